"""What quantized weights are multiplied with, where the CPU's kernels for int8 take bf16 and where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from helpers_int8 import needs_int8
from helpers_models import make_model
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino import device
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import activation_type, compute_precision, settle_dtype
from penstock.engines.openvino.int8_kernels import rounds_activations
from penstock.engines.openvino.kv_types import kv_cache_type

CAPABILITIES = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
needs_bf16 = pytest.mark.skipif("BF16" not in CAPABILITIES, reason="this CPU does not compute in bf16")
EVERYWHERE, IN_F32, NOWHERE = ("bf16", "f32"), ("f32",), ()


class CoreWithBf16:
    def get_property(self, name: str, key: str) -> list[str]:
        return ["FP32", "BF16", "INT8"]


def chosen(*, all_integers: bool = True, **settings: str) -> tuple[str, str, str]:
    """Precision of the computation, of the KV cache, and of the activations of int4 weights."""
    core = CoreWithBf16()
    config = OpenVINOConfig(Path(), weights="int4", **settings)  # type: ignore[arg-type]
    config = settle_dtype(core, config, all_integers=all_integers)
    precision = compute_precision(core, config)
    return precision, kv_cache_type(config, precision, 64).name, activation_type(config, precision, True)


@pytest.mark.parametrize(
    ("kernels", "settings", "expected"),
    [
        (EVERYWHERE, {}, ("bf16", "bf16", "int8")),
        (EVERYWHERE, {"activations": "int8"}, ("bf16", "bf16", "int8")),
        (EVERYWHERE, {"dtype": "f32"}, ("f32", "f32", "int8")),
        (IN_F32, {}, ("f32", "f16", "int8")),
        (IN_F32, {"all_integers": False}, ("bf16", "bf16", "bf16")),
        (IN_F32, {"dtype": "bf16"}, ("bf16", "bf16", "bf16")),
        (IN_F32, {"activations": "bf16"}, ("bf16", "bf16", "bf16")),
        (IN_F32, {"activations": "int8"}, ("f32", "f16", "int8")),
        (IN_F32, {"activations": "int8", "kv_cache_dtype": "u8"}, ("f32", "u8", "int8")),
        (IN_F32, {"activations": "int8", "dtype": "f32"}, ("f32", "f32", "int8")),
        (IN_F32, {"dtype": "f32"}, ("f32", "f32", "int8")),
        (NOWHERE, {}, ("bf16", "bf16", "bf16")),
        (NOWHERE, {"dtype": "f32"}, ("f32", "f32", "f32")),
    ],
)
def test_choices(
    kernels: tuple[str, ...], settings: dict[str, Any], expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "rounds_activations", lambda _, precision: precision in kernels)
    assert chosen(**settings) == expected


@pytest.mark.parametrize(
    ("kernels", "dtype", "message"),
    [
        (IN_F32, "bf16", "not offered by this CPU with dtype=bf16; int8 with dtype=f32, or bf16 is"),
        (NOWHERE, "auto", "not offered by this CPU with dtype=f32; f32 is"),
    ],
)
def test_what_the_cpu_cannot_do(
    kernels: tuple[str, ...], dtype: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "rounds_activations", lambda _, precision: precision in kernels)
    with pytest.raises(UnsupportedError, match=message) as caught:
        chosen(activations="int8", dtype=dtype)
    assert caught.value.param == "activations"


@needs_bf16
@needs_int8
def test_a_runner_says_what_it_does(tmp_path: Path, make_runner: Any) -> None:
    folder = make_model(tmp_path)
    by_itself = make_runner(folder, dtype="auto", weights="int8").info.runner
    assert f"activations int8, kv {'bf16' if rounds_activations('CPU', 'bf16') else 'f16'}" in by_itself
    exact = make_runner(folder, dtype="auto", weights="int8", activations="bf16").info.runner
    assert "activations bf16, kv bf16" in exact
