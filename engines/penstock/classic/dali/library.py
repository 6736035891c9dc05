"""DALI itself, imported when the first model needs it, and what its errors say."""

from __future__ import annotations

import re
from typing import Any

from penstock.classic.described import load_package

_OPERATOR = re.compile(r"Error in \w+ operator `(?:nvidia\.dali\.)?(.*?)`")
_ENCOUNTERED = re.compile(r"encountered:\s*(.*?)\s*(?:Current pipeline object|Stacktrace|$)", re.DOTALL)
_PLACES = re.compile(r'^Assert on ".*?" failed: |\[\S+:\d+\]\s*', re.DOTALL)
_PATHS = re.compile(r"/[^\s\"';]*/")


def load_dali(module: str = "nvidia.dali") -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package(module, "DALI pipelines", "'penstock-server[dali]'")


def explain(error: Exception) -> str:
    """A text without the pipeline's source, places in DALI's own, and folders of this machine."""
    text = str(error)
    operator, found = _OPERATOR.search(text), _ENCOUNTERED.search(text)
    told = _PATHS.sub("", _PLACES.sub("", found.group(1) if found else text))
    prefix = f"{operator.group(1)}: " if operator else ""
    return prefix + " ".join(told.split())[:400]
