"""Names of models as Ollama's clients send them."""

from __future__ import annotations

from collections.abc import Callable

_TAG = ":latest"


def model_name(given: str, is_known: Callable[[str], bool]) -> str:
    """Clients put a tag behind names that have none."""
    return given.removesuffix(_TAG) if given.endswith(_TAG) and not is_known(given) else given
