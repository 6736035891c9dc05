"""`activations=mixed`: two compiled models over one KV cache, chosen by the tokens of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.openvino import trials
from penstock.engines.openvino.device import ThreadPlan, with_large_steps
from penstock.engines.openvino.model import BufferedDecoder
from penstock.engines.openvino.numerics import CpuFacts
from support.cpu import needs_bf16, needs_int8
from support.models import make_model
from support.runner import Driver, prompt


@pytest.fixture
def kernels_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "cpu_facts", lambda _: CpuFacts(("bf16", "f32"), frozenset({"f32"})))


@pytest.mark.parametrize(
    ("plans", "most_tokens", "large"),
    [
        ([ThreadPlan(2, 0)], 512, [ThreadPlan(2, 48, is_large=True)]),
        ([ThreadPlan(2, 0)], 47, []),
        ([ThreadPlan(1, 0), ThreadPlan(2, 100)], 512, [ThreadPlan(2, 101, is_large=True)]),
    ],
)
def test_large_steps_are_another_plan(plans: list[ThreadPlan], most_tokens: int, large: list[ThreadPlan]) -> None:
    assert with_large_steps(plans, most_tokens) == [*plans, *large]


@needs_bf16
@needs_int8
@pytest.mark.usefixtures("kernels_of_amx")
@pytest.mark.parametrize("adapters", [0, 1])
def test_small_steps_continue_what_large_ones_began(
    adapters: int, tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    prepare = BufferedDecoder.prepare

    def observe(model: BufferedDecoder, buffer: int, batch: Any) -> None:
        prepare(model, buffer, batch)
        used.append(model._buffers[buffer].requests.index(model._buffers[buffer].chosen))

    folder = make_model(tmp_path, eos_token_id=None)
    settings = {"dtype": "auto", "weights": "int8", "kv_cache_dtype": "auto", "threads": 1, "max_loras": adapters}
    mixed, bf16 = (make_runner(folder, **settings, activations=kind) for kind in ("mixed", "bf16"))
    assert "f32, weights int8, activations mixed, kv u8" in mixed.info.runner
    tokens = prompt(60, 1)
    expected = Driver(bf16).generate([tokens], 8)
    monkeypatch.setattr(BufferedDecoder, "prepare", observe)
    assert Driver(mixed).generate([tokens], 8) == expected
    assert used == [1] + [0] * 7
