"""What turns a model's texts into tokens and back: its tokenizer, chat template and parsers, from the model's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import LanguageModelConfig
from penstock.gateway.llm.models import (
    ModelParsers,
    ModelSource,
    TextSettings,
    choose_parsers,
    default_params,
    load_chat_template,
)
from penstock.tokenizers import ChatTemplate, SpecialTextGuard, TemplateNeeds, Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class ModelTexts:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    parsers: ModelParsers
    guard: SpecialTextGuard | None
    """None: the text of a special token in a chat is that token."""
    default_params: dict[str, Any]
    template_needs: dict[str, TemplateNeeds]
    """Of each of the model's chat templates by its name, where it has needs."""


def text_settings(config: LanguageModelConfig, source: ModelSource) -> TextSettings:
    return TextSettings(
        folder=str(source.folder),
        chat_template=config.chat_template,
        chat_template_content_format=config.chat_template_content_format,
        special_tokens_in_content=config.special_tokens_in_content,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


def read_tokenizer(settings: TextSettings) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer(Path(settings.folder))
    except TokenizerError as error:
        raise ConfigError(f"model: {error}") from None


def read_texts(settings: TextSettings, tokenizer: Tokenizer) -> ModelTexts:
    """The rest, which needs the tokenizer. Raises ConfigError."""
    given = settings.chat_template_content_format
    template = load_chat_template(tokenizer, settings.chat_template, None if given == "auto" else given)
    parsers = choose_parsers(settings.tool_parser, settings.reasoning_parser, template, tokenizer)
    templates = {} if template is None else template.by_name
    guard = None
    if templates and not settings.special_tokens_in_content:
        sources = "\n".join(each.source for each in templates.values())
        guard = tokenizer.special_text_guard(sources, parsers.own_tags)
    needs = {name: each.needs for name, each in templates.items() if each.needs != TemplateNeeds()}
    return ModelTexts(tokenizer, template, parsers, guard, default_params(Path(settings.folder)), needs)
