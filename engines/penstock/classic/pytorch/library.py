"""PyTorch itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from penstock.classic.described import load_package, missing_package

_LAST_ERROR = re.compile(r"^(?:\w+(?:Error|Exception)): (.*)", re.MULTILINE | re.DOTALL)
_NATIVE_FRAMES = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #).*", re.DOTALL)
_INSTALL = "'penstock-server[pytorch]'"


def check_installed() -> None:
    """Raises ValueError, without the seconds that an import takes."""
    if importlib.util.find_spec("torch") is None:
        raise missing_package("torch", "PyTorch models", "it is not installed", _INSTALL)


def load_torch(module: str = "torch") -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package(module, "PyTorch models", _INSTALL)


def explain(error: Exception) -> str:
    """A text without tracebacks and places: TorchScript puts the model's source before what happened."""
    text = _NATIVE_FRAMES.sub("", str(error))
    found = _LAST_ERROR.findall(text)
    return (found[-1] if found else text).strip()[:400] or type(error).__name__
