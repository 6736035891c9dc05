"""`activations=mixed`: two compiled models over one KV cache, chosen by the tokens of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from helpers_models import make_model
from helpers_runner import Driver, prompt
from penstock.engines.errors import PenstockError
from penstock.engines.openvino import mixed_steps
from penstock.engines.openvino.device import ThreadPlan
from penstock.engines.openvino.int8_kernels import rounds_activations
from penstock.engines.openvino.mixed_steps import with_large_steps
from penstock.engines.openvino.model import BufferedDecoder

IN_F32 = ("f32",)

needs_bf16 = pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") or not rounds_activations("CPU", "f32"),
    reason="this CPU does not compute in bf16 and int8",
)


@pytest.fixture
def kernels_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_steps, "rounds_activations", lambda _, precision: precision in IN_F32)


@pytest.mark.parametrize(
    ("plans", "most_tokens", "large"),
    [
        ([ThreadPlan(2, 0)], 512, [ThreadPlan(2, 48, in_bf16=True)]),
        ([ThreadPlan(2, 0)], 47, []),
        ([ThreadPlan(1, 0), ThreadPlan(2, 100)], 512, [ThreadPlan(2, 101, in_bf16=True)]),
    ],
)
def test_large_steps_are_another_plan(plans: list[ThreadPlan], most_tokens: int, large: list[ThreadPlan]) -> None:
    assert with_large_steps(plans, most_tokens) == [*plans, *large]


@needs_bf16
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "auto"}, "activations=mixed needs weights=int8 or weights=int4"),
        ({"dtype": "f32"}, "activations=mixed does not go with a dtype"),
        ({"kv_cache_dtype": "f32"}, "kv_cache_dtype=f32 does not go with activations=mixed; u8, u8-u4, u4 do"),
    ],
)
def test_what_does_not_go_with_it(settings: dict[str, str], message: str, llama_dir: Path, make_runner: Any) -> None:
    given = {"dtype": "auto", "weights": "int8", "kv_cache_dtype": "auto", **settings}
    with pytest.raises(PenstockError, match=message):
        make_runner(llama_dir, activations="mixed", **given)


@pytest.mark.parametrize("kernels", [(), ("f32", "bf16")])
def test_a_cpu_with_nothing_to_mix(
    kernels: tuple[str, ...], llama_dir: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_steps, "rounds_activations", lambda _, precision: precision in kernels)
    with pytest.raises(PenstockError, match="activations=mixed is not offered by this CPU"):
        make_runner(llama_dir, activations="mixed", dtype="auto", weights="int8", kv_cache_dtype="auto")
