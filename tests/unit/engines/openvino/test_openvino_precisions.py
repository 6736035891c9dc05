"""Lower precisions stay close to f32; exactness is for f32 only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import pytest
import torch
from safetensors.torch import save_file

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.weights import Weights, quantize_rows
from support.cpu import FACTS, needs_bf16
from support.models import load_reference, make_model, reference_logprobs
from support.quantized import product_and_types
from support.runner import Driver, prompt

LOW = {"weights": "int8", "kv_cache_dtype": "u8"}


def prompt_logprobs(runner: Any, tokens: list[int]) -> Any:
    driver = Driver(runner)
    driver.add(1, tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    entries = driver.step().prompt_logprobs[1]
    return np.array([e.logprob for e in entries]), [e.top[0][0] for e in entries]


@pytest.mark.parametrize(
    ("settings", "error", "agreement"),
    [
        pytest.param({"kv_cache_dtype": "u8"}, 0.1, 0.9, id="u8"),
        pytest.param({"kv_cache_dtype": "f16"}, 0.02, 0.97, id="kv-f16"),
        pytest.param({"weights": "bf16"}, 0.1, 0.9, id="weights-bf16"),
        pytest.param({"weights": "f16"}, 0.02, 0.97, id="weights-f16"),
        pytest.param({"weights": "int8"}, 0.3, 0.85, id="int8"),
        pytest.param(LOW, 0.3, 0.85, id="int8-u8"),
        pytest.param({"dtype": "bf16"}, 0.3, 0.85, id="bf16", marks=needs_bf16),
        pytest.param(
            {"dtype": "bf16", "weights": "int8", "kv_cache_dtype": "u8"}, 0.5, 0.8, id="low", marks=needs_bf16
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_close_to_the_reference(
    settings: dict[str, Any], error: float, agreement: float, family: str, tmp_path: Path, make_runner: Any
) -> None:
    make_model(tmp_path, family)
    tokens = prompt(200, 3)
    wanted = reference_logprobs(load_reference(tmp_path), tokens).numpy()
    logprobs, likeliest = prompt_logprobs(make_runner(tmp_path, **settings), tokens)
    assert np.abs(logprobs - wanted[np.arange(199), tokens[1:]]).mean() < error
    assert (wanted[:-1].argmax(axis=1) == likeliest).mean() > agreement


def test_f16_computation_is_right_or_refused(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    tokens = prompt(200, 3)
    refusal = ""
    try:
        runner = make_runner(tmp_path, dtype="f16")
    except UnsupportedError as error:
        refusal = error.message
    if refusal:
        reason = "computes the attention of prompts wrong" if "f16" in FACTS.dtypes else "no instructions for it"
        assert reason in refusal
        return
    logprobs, _ = prompt_logprobs(runner, tokens)
    wanted = reference_logprobs(load_reference(tmp_path), tokens).numpy()
    assert np.abs(logprobs - wanted[np.arange(199), tokens[1:]]).mean() < 0.05


def test_auto_takes_what_the_cpu_has(llama_dir: Path, make_runner: Any) -> None:
    wanted = FACTS.dtypes[0]
    assert f"openvino {wanted}, weights as stored, kv {wanted}" in make_runner(llama_dir, dtype="auto").info.runner


def test_rows_quantized(tmp_path: Path) -> None:
    matrix = torch.randn(7, 40) * torch.logspace(-6, 6, 7)[:, None]
    matrix[3] = 0
    save_file({"w": matrix}, tmp_path / "model.safetensors")
    values, scales = quantize_rows(Checkpoint(tmp_path)["w"])
    assert np.isfinite(scales).all()
    assert (values[3] == 0).all()
    assert (np.abs(values).max(axis=1)[[0, 1, 2, 4, 5, 6]] == 127).all()
    error = np.abs(values * scales - matrix.numpy())
    assert (error <= scales * 0.5001).all()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("width", "parts"), [(40, 1), (2560, 1), (2568, 2), (4608, 3), (8192, 4), (8200, 1)])
def test_wide_matrices_in_int8_give_the_same_products_in_parts(
    width: int, parts: int, weights: Any, tmp_path: Path
) -> None:
    """Also those that stay in 8 bits among others in 4."""
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({name: torch.randn(7, width, generator=torch.Generator().manual_seed(0))}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    values, scales = quantize_rows(checkpoint[name])
    for count in (1, 9):
        x = np.random.default_rng(count).standard_normal((count, width), np.float32)
        for unpacks in (False, True):
            made = Weights(checkpoint, weights, unpacks=unpacks)
            found, types = product_and_types(made, name, (7, width), x)
            np.testing.assert_allclose(found, x @ (values * scales).T, atol=1e-3)
            assert "i8" in types
    rows = ops.parameter([-1, width], np.float32)
    graph = ov.Model([made.project(rows, name, (7, width))], [rows], "m")
    assert [node.get_type_name() for node in graph.get_ops()].count("MatMul") == parts


def test_a_model_with_an_all_zero_row_in_int8(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    model = load_reference(tmp_path)
    model.model.layers[1].mlp.up_proj.weight.data[5] = 0
    model.lm_head.weight.data[9] = 0
    model.save_pretrained(tmp_path)
    driver = Driver(make_runner(tmp_path, weights="int8"))
    assert [len(tokens) for tokens in driver.generate([[4, 5, 6]], 5)] == [5]
    assert driver.last.failed == {}
