"""What parsers of reasoning and tool calls are written with: text that arrives in pieces, read as if it were whole."""

from .reader import Reader, Reading
from .registry import ParserRegistry
from .stage import ParserStage
from .tags import Tags

__all__ = ["ParserRegistry", "ParserStage", "Reader", "Reading", "Tags"]
