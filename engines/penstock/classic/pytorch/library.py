"""PyTorch itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import importlib
import re
from typing import Any

_LAST_ERROR = re.compile(r"^(?:\w+(?:Error|Exception)): (.*)", re.MULTILINE | re.DOTALL)
_NATIVE_FRAMES = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #).*", re.DOTALL)


def load(module: str = "torch") -> Any:
    """The module. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"PyTorch models need the package torch ({error}): pip install 'penstock[pytorch]'") from error


def explain(error: Exception) -> str:
    """A text without tracebacks and places: TorchScript puts the model's source before what happened."""
    text = _NATIVE_FRAMES.sub("", str(error))
    found = _LAST_ERROR.findall(text)
    return (found[-1] if found else text).strip()[:400] or type(error).__name__
