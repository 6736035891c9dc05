"""`from penstock import LLM`: models in a Python program, without a server. See `penstock.gateway.commands.offline`."""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engines import __version__ as __version__
    from penstock.gateway.commands.offline.llm import LLM

__path__ = extend_path(__path__, __name__)  # in a checkout the other rooms are beside this one
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads what a program uses, when it does: importing `penstock` alone costs nothing."""
    if name == "LLM":
        from penstock.gateway.commands.offline.llm import LLM

        return LLM
    if name == "__version__":
        from penstock.engines import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
