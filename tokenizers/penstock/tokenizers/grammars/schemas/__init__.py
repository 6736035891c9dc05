"""JSON schemas in the words that llguidance knows."""

from .effort import Effort
from .rewriting import rewritten

__all__ = ["Effort", "rewritten"]
