"""The text of special tokens in what clients send stays text: only a chat template writes special tokens."""

from .guard import SpecialTextGuard
from .sealed import SealedTokenizer

__all__ = ["SealedTokenizer", "SpecialTextGuard"]
