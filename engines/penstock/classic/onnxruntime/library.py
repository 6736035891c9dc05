"""ONNX Runtime itself, imported when the first model needs it."""

from __future__ import annotations

import re
from typing import Any

from penstock.classic.described import load_package

INVALID_ARGUMENT = 2
FAIL = 1
_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_PLACE = re.compile(r"(?:\S*/onnxruntime/\S+|\w+\.(?:cc|h)):\d+ (?:[\w:<>~&* ]+\([^)]*\)(?: const)? )?")
_INSTALL = "'penstock-server[onnx]', or for NVIDIA GPUs onnxruntime-gpu and onnx"


def load_onnxruntime(module: str = "onnxruntime") -> Any:
    """The module `onnxruntime` (or `onnx`). Raises ValueError that says how to install it."""
    return load_package(module, "ONNX models", _INSTALL)


def explain(error: Exception) -> tuple[int, str]:
    """The code of an ONNX Runtime error (0: it is none) and a text without the places in its own source."""
    match = _ERROR.match(str(error))
    if match is None:
        return 0, f"{type(error).__name__}: {error}"
    code, text = match.groups()
    return int(code), f"onnx runtime error {code}: {_PLACE.sub('', text).strip()}"
