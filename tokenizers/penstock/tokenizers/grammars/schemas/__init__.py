"""JSON schemas in the words that llguidance knows."""

from .rewriting import rewritten

__all__ = ["rewritten"]
