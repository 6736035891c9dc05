"""TensorFlow itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from typing import Any

from penstock.classic.described import load_package

_NODES = re.compile(r"\s*\[\[.*?\]\]", re.DOTALL)
_HEAD = re.compile(r"^\s*(?:Graph execution error:\s*)?(?:Detected at node.*?\n\n)?", re.DOTALL)
_PATHS = re.compile(r"/[^\s\"';]*/")


def is_installed() -> bool:
    """Nothing is imported for it."""
    return importlib.util.find_spec("tensorflow") is not None


@cache
def load_tensorflow() -> Any:
    """The module. Raises ValueError that says how to install it."""
    # what fails in a request is that request's answer; TensorFlow would write about its build and every failure
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tensorflow = load_package("tensorflow", "models with TF_RUNTIME tensorflow", "'penstock-server[tensorflow]'")
    tensorflow.get_logger().setLevel("ERROR")
    return tensorflow


def explain(error: Exception) -> str:
    """A text without the graph's nodes, where they were made, and folders of this machine."""
    text = _HEAD.sub("", str(getattr(error, "message", error)))
    text = _PATHS.sub("", _NODES.sub("", text.partition("Original stack trace")[0]))
    return " ".join(text.split())[:400] or type(error).__name__
