"""Encoding of long texts piece by piece, until it is certain that there are too many tokens."""

from .encoder import BoundedEncoder

__all__ = ["BoundedEncoder"]
