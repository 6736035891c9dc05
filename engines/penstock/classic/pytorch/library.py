"""PyTorch itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

_LAST_ERROR = re.compile(r"^(?:\w+(?:Error|Exception)): (.*)", re.MULTILINE | re.DOTALL)
_NATIVE_FRAMES = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #).*", re.DOTALL)


def check_installed() -> None:
    """Raises ValueError, without the seconds that an import takes."""
    if importlib.util.find_spec("torch") is None:
        raise _missing("it is not installed")


def load(module: str = "torch") -> Any:
    """The module. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(error) from error


def _missing(reason: object) -> ValueError:
    return ValueError(f"PyTorch models need the package torch ({reason}): pip install 'penstock-server[pytorch]'")


def explain(error: Exception) -> str:
    """A text without tracebacks and places: TorchScript puts the model's source before what happened."""
    text = _NATIVE_FRAMES.sub("", str(error))
    found = _LAST_ERROR.findall(text)
    return (found[-1] if found else text).strip()[:400] or type(error).__name__
