"""Quantized KV caches: their sizes, what they cost in quality, and that attention over them is right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino import trial_graphs
from penstock.engines.openvino.config import KVCacheType
from penstock.engines.openvino.numerics import QUANTIZED_KV, group_size, kv_cache_type, quantized_bytes
from penstock.engines.openvino.trial_graphs import attention_fault
from penstock.gateway.commands.bench.perplexity_bench import kl_divergences
from penstock.gateway.commands.bench.text import library_text
from penstock.tokenizers.hf import Tokenizer
from support.models import make_model
from support.runner import Driver

DEMO = Path(__file__).parents[4] / "gateway/penstock/gateway/demo_model"


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("name", QUANTIZED_KV)
def test_a_block_takes_what_is_estimated(name: str, head_size: int, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", head_dim=head_size, num_hidden_layers=2)
    runner = make_runner(tmp_path, kv_cache_dtype=name)
    numbers = 2 * 2 * runner.info.block_size * 2 * head_size  # layers, keys and values, tokens, heads
    assert runner._decoders[0].block_bytes == numbers * quantized_bytes(name, head_size)
    held = sum(raw.nbytes for raw in runner._model.cache._raw)
    assert held == runner._decoders[0].block_bytes * runner.info.num_blocks
    assert f"kv {name}," in runner.info.runner


def test_groups_divide_heads() -> None:
    sizes = (8, 16, 20, 64, 72, 74, 80, 96, 100, 112, 128, 256)
    assert [group_size(size) for size in sizes] == [8, 16, 20, 32, 36, 74, 40, 32, 20, 28, 32, 32]


@pytest.mark.parametrize("name", ["u4", "u8-u4"])
def test_odd_heads_have_no_values_in_4_bits(name: KVCacheType) -> None:
    with pytest.raises(UnsupportedError, match=f"kv_cache_dtype={name} needs an even head size, and .* is 5; use u8"):
        kv_cache_type(name, "f32", 5)
    assert kv_cache_type("u8", "f32", 5).value == "u8"


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Of 200 tokens."""
    return Tokenizer(DEMO).encode(library_text("docstrings", 3000))[:200]


def logits(runner: Any, tokens: list[int], pieces: list[int]) -> Any:
    rows: list[Any] = []
    runner.watch_prompt_logits = lambda request_id, found: rows.append(found.copy())
    driver = Driver(runner)
    driver.add(1, tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    for piece in pieces:
        driver.step({1: piece})
    return np.concatenate(rows)


def test_what_they_cost_in_quality(text: list[int], make_runner: Any) -> None:
    """Least with 8 bits, and most with 4; in one piece, and token by token as an answer is."""
    exact = logits(make_runner(DEMO), text, [200])
    lost = []
    for name in QUANTIZED_KV:
        runner = make_runner(DEMO, kv_cache_dtype=name)
        at_once = logits(runner, text, [200])
        runner.reset()
        one_by_one = logits(runner, text, [140, *[1] * 60])
        lost.append([kl_divergences(exact, found).mean() for found in (at_once, one_by_one)])
    for found, most in zip(lost, (0.0002, 0.008, 0.016), strict=True):
        assert max(found) < most
    assert lost[0] < lost[1] < lost[2]


@pytest.mark.parametrize("name", QUANTIZED_KV)
def test_attention_is_right(name: KVCacheType) -> None:
    assert attention_fault("f32", kv_cache_type(name, "f32", 64)) == ""


def test_wrong_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_graphs, "_attention", lambda query, key, value: np.full_like(value, math.nan))
    fault = attention_fault("f32", kv_cache_type("auto", "f32", 64))
    assert re.match(r"OpenVINO .* computes the attention of prompts wrong in f32", fault)
