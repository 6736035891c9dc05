"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings, output parsers, chat templates."""

from .chat import ANY_ROLE, ChatTemplate, check_kwargs
from .detection import detect_reasoning_parser, detect_tool_parser
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, ChatTemplateTimeout, PromptTooLong, TokenizerError
from .hf import Tokenizer
from .messages import ContentFormat, TemplateNeeds, content_format, normalize_messages
from .output_stages import OutputStage, Part, ReasoningPart, StageChain, StageFactory, TextPart, ToolCallPart
from .reasoning import AnswerFrame, ReasoningParser, ThoughtTags, find_reasoning_parser, reasoning_parser_names
from .special_tokens import SealedTokenizer, SpecialTextGuard
from .stop import StopStrings
from .tool_calls import JSON_LIST_OF_CALLS, Tool, ToolParser, find_tool_parser, tool_parser_names

__all__ = [
    "ANY_ROLE",
    "JSON_LIST_OF_CALLS",
    "AnswerFrame",
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateTimeout",
    "ContentFormat",
    "IncrementalDetokenizer",
    "OutputStage",
    "Part",
    "PromptTooLong",
    "ReasoningParser",
    "ReasoningPart",
    "SealedTokenizer",
    "SpecialTextGuard",
    "StageChain",
    "StageFactory",
    "StopStrings",
    "TemplateNeeds",
    "TextPart",
    "ThoughtTags",
    "Tokenizer",
    "TokenizerError",
    "Tool",
    "ToolCallPart",
    "ToolParser",
    "check_kwargs",
    "content_format",
    "detect_reasoning_parser",
    "detect_tool_parser",
    "find_reasoning_parser",
    "find_tool_parser",
    "normalize_messages",
    "reasoning_parser_names",
    "tool_parser_names",
]
