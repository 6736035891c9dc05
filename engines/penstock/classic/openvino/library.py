"""OpenVINO itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from penstock.classic.described import load_package

_PLACES = re.compile(
    r"(?:Exception from |Check '.*' failed at )?\S*src/\S+:\d+:?|FrontEnd API failed.*|Caught exception: "
)
_PATHS = re.compile(r"/[^\s\"']*/")


def load_openvino() -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package("openvino", "OpenVINO models", "openvino")


@cache
def core() -> Any:
    """The one of the process: its plugins share their threads."""
    found = load_openvino().Core()
    # weights that stay mapped change with the file, and end the process if it becomes shorter
    found.set_property({"ENABLE_MMAP": False})
    return found


def explain(error: Exception) -> str:
    """A text without the places in OpenVINO's own source, and without folders of this machine."""
    text = _PLACES.sub("", str(error))
    return " ".join(_PATHS.sub("", text).split())[:400] or type(error).__name__
