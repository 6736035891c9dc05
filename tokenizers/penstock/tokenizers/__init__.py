"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings, output stages, chat templates."""

from .chat import ChatTemplate, check_kwargs
from .content_format import ContentFormat, content_format
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, ChatTemplateTimeout, PromptTooLong, TokenizerError
from .hf import Tokenizer
from .messages import normalize_messages
from .output_parts import Part, ReasoningPart, TextPart, ToolCallPart
from .output_stages import OutputStage, StageChain, StageFactory
from .stop import StopStrings

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateTimeout",
    "ContentFormat",
    "IncrementalDetokenizer",
    "OutputStage",
    "Part",
    "PromptTooLong",
    "ReasoningPart",
    "StageChain",
    "StageFactory",
    "StopStrings",
    "TextPart",
    "Tokenizer",
    "TokenizerError",
    "ToolCallPart",
    "check_kwargs",
    "content_format",
    "normalize_messages",
]
