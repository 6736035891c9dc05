"""What a model's output may be, as masks over its vocabulary."""

from .compiler import CompiledGrammar, GrammarCompiler, GrammarError
from .matcher import MaskFiller, TokenMatcher

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarError", "MaskFiller", "TokenMatcher"]
