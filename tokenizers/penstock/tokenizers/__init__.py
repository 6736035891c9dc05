"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings, chat templates."""

from .chat import ChatTemplate, check_kwargs
from .content_format import ContentFormat, content_format
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, ChatTemplateTimeout, PromptTooLong, TokenizerError
from .hf import Tokenizer
from .messages import normalize_messages
from .stop import StopStrings

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateTimeout",
    "ContentFormat",
    "IncrementalDetokenizer",
    "PromptTooLong",
    "StopStrings",
    "Tokenizer",
    "TokenizerError",
    "check_kwargs",
    "content_format",
    "normalize_messages",
]
