"""Quantized checkpoints on vLLM's build for CPUs: which run, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.contract.loading import silent
from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import EngineError
from penstock.engines.registry import BATCHERS, EngineSpec, load_runner
from penstock.gateway.models.language.models import find_model
from support.models import load_reference, reference_logprobs
from support.quantized import gptq, packed, plain_int8, reference_of, round_to_levels, write_quantized
from support.runner import Driver, prompt

PROMPT = prompt(50, 1)
WHOLE_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
EACH_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


@pytest.fixture(scope="module")
def original(needs_vllm: None) -> Path:
    """The demo model: rounding hardly changes what a trained model says."""
    return find_model(None).folder


def compressed(original: Path, target: Path, stored: str, pack: Any, inputs: Any = None) -> Path:
    """compressed-tensors in 8 bits, with a scale for each row."""

    def pack_rows(name: str, matrix: Any) -> Any:
        levels = round_to_levels(matrix, 8, symmetric=True, group=matrix.shape[1])
        return pack(levels), levels.floats()

    groups = {"group_0": {"targets": ["Linear"], "weights": WHOLE_ROWS, "input_activations": inputs}}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, "ignore": ["lm_head"]}
    return write_quantized(original, target, config, pack_rows)


def load(folder: Path) -> Any:
    options = {"model_dir": str(folder), "num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return load_runner(EngineSpec(runner="vllm", options=options))


def is_close_to_reference(folder: Path) -> None:
    """In the prompt's logprobs: activations are rounded, too, or computed in bf16."""
    driver = Driver(load(folder))
    driver.add(0, PROMPT, SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0))
    found = driver.step().prompt_logprobs[0]
    expected = reference_logprobs(load_reference(reference_of(folder)), PROMPT)
    apart = [abs(each.logprob - expected[place, each.token_id].item()) for place, each in enumerate(found)]
    assert len(apart) == len(PROMPT) - 1
    assert sum(apart) / len(apart) < 0.2


def test_int8_weights_with_int8_activations_run(original: Path, tmp_path: Path) -> None:
    def rows(levels: Any) -> Any:
        found = plain_int8(levels)
        del found["input_scale"]  # activations have a scale for each token
        return found

    is_close_to_reference(compressed(original, tmp_path / "w8a8", "int-quantized", rows, EACH_TOKEN))


def test_int4_weights_run_where_vllm_has_a_kernel_and_are_refused_by_its_name_elsewhere(
    original: Path, tmp_path: Path
) -> None:
    def pack(name: str, matrix: Any) -> Any:
        levels = round_to_levels(matrix, 4, symmetric=True)
        return gptq(levels), levels.floats()

    folder = write_quantized(original, tmp_path / "w4a16", GPTQ, pack)
    if torch.cpu._is_avx512_supported():
        is_close_to_reference(folder)
        return
    with pytest.raises(EngineError, match=r"lacks the kernel cpu_gemm_wna16, which \w+ weights need$"):
        load(folder)


def test_weights_without_any_kernel_are_refused_in_one_line(original: Path, tmp_path: Path) -> None:
    folder = compressed(original, tmp_path / "w8a16", "pack-quantized", lambda levels: packed(levels, symmetric=True))
    options = {"model_dir": str(folder), "num_blocks": 8}
    with pytest.raises(EngineError, match=r"cannot run this model: ValueError: .*CPUWNA16.*uint8b128") as refusal:
        BATCHERS["vllm"](options, silent)
    assert "\n" not in refusal.value.message
