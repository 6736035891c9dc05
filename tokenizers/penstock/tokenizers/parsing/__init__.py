"""The base of parsers of reasoning and tool calls: text that arrives in pieces, read as if it were whole."""

from .reader import Reader, Reading, Tags
from .registry import ParserRegistry
from .stage import ParserStage

__all__ = ["ParserRegistry", "ParserStage", "Reader", "Reading", "Tags"]
