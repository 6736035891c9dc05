"""Packages that a backend imports when its first model needs them."""

from __future__ import annotations

import importlib
from typing import Any


def load(module: str, purpose: str, extra: str) -> Any:
    """The module. Raises ValueError that says how to install it.

    `purpose` is what needs it ("XGBoost models"), `extra` the extra of penstock that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{purpose} need the package {package} ({error}): pip install 'penstock-server[{extra}]'"
        ) from error
