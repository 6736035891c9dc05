"""JSON schemas in the words that llguidance knows."""

from .evaluated import Effort
from .exact_numbers import with_exact_numbers
from .rewriting import rewritten

__all__ = ["Effort", "rewritten", "with_exact_numbers"]
