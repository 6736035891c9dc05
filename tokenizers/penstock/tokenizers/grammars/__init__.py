"""Grammars of a model's output, as masks over its vocabulary."""

from ..reasoning import ThoughtTags
from .compiler import CompiledGrammar, GrammarCompiler, GrammarError
from .matcher import BitMasks, MaskFiller, TokenMatcher

__all__ = [
    "BitMasks",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "MaskFiller",
    "ThoughtTags",
    "TokenMatcher",
]
