"""Formats of quantized checkpoints: `quantization_config` of config.json -> `Scheme`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.quantized import bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from penstock.engines.formats.quantized.bitsandbytes import CodebookTensor
from penstock.engines.formats.quantized.fp8 import Float8Tensor
from penstock.engines.formats.quantized.integers import IntegerTensor
from penstock.engines.formats.quantized.mxfp4 import Mxfp4Tensor
from penstock.engines.formats.quantized.settings import Settings
from penstock.engines.formats.safetensors_file import StoredTensor

QuantizedTensor = IntegerTensor | Float8Tensor | CodebookTensor | Mxfp4Tensor


class Scheme(Protocol):
    """A format, with what quantization_config says of it."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> int:
        """Of a quantized weight."""
        ...

    def assemble(self, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor | QuantizedTensor]:
        """Tensors by the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        ...


_METHODS: dict[str, Callable[[Settings], Scheme]] = {
    "gptq": gptq.parse,
    "awq": gptq.parse_awq,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "fbgemm_fp8": fp8.parse,
    "bitsandbytes": bitsandbytes.parse,
    "mxfp4": mxfp4.parse,
}


def parse_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Of config.json; None: it says nothing of quantization. Raises UnsupportedError, naming what is not supported."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedError(
            f"quantization_config has quant_method={str(method)[:50]}, which is not supported; "
            f"supported are {', '.join(_METHODS)}"
        )
    return _METHODS[method](settings)
