"""OpenVINO itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

_PLACES = re.compile(
    r"(?:Exception from |Check '.*' failed at )?\S*src/\S+:\d+:?|FrontEnd API failed.*|Caught exception: "
)
_PATHS = re.compile(r"/[^\s\"']*/")


def load() -> Any:
    """The module. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise ValueError(f"this model needs the package openvino ({error}): pip install openvino") from error


@cache
def core() -> Any:
    """The one of the process: its plugins share their threads."""
    made = load().Core()
    # weights that stay mapped change with the file, and end the process if it becomes shorter
    made.set_property({"ENABLE_MMAP": False})
    return made


def explain(error: Exception) -> str:
    """A text without the places in OpenVINO's own source, and without folders of this machine."""
    text = _PLACES.sub("", str(error))
    return " ".join(_PATHS.sub("", text).split())[:400] or type(error).__name__
