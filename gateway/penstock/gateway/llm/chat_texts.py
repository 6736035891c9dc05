"""From the messages of a chat to the text that is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.llm.models import LoadedModel
from penstock.tokenizers import ChatTemplate, ChatTemplateError, SealedTokenizer, SpecialTextGuard, Tokenizer

_TEMPLATE_SECONDS = 10.0
_PROMPT_END = 100


@dataclass(frozen=True, slots=True)
class ChatText:
    text: str
    """To be encoded with `tokenizer`, which may have other names for special tokens than the model's own."""
    end: str
    """The last characters of the prompt."""
    tokenizer: Tokenizer | SealedTokenizer


@dataclass(frozen=True, slots=True)
class ChatValues:
    """What a template renders."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    extra: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


def chat_text(model: LoadedModel, template: ChatTemplate, values: ChatValues) -> ChatText:
    """Raises ChatTemplateError. Blocks while the template renders."""
    template = template.choose(values.tools, values.documents)
    messages = template.normalize(values.messages)
    others = (values.tools, values.documents, values.extra)
    guard = model.guard
    if guard is not None and _finds(guard, messages, others):
        return _guarded_text(guard, template, values, messages)
    text = _render(template, values, messages, others)
    return ChatText(text, text[-_PROMPT_END:], model.tokenizer)


def _guarded_text(
    guard: SpecialTextGuard, template: ChatTemplate, values: ChatValues, messages: list[dict[str, Any]]
) -> ChatText:
    others = (values.tools, values.documents, values.extra)
    mark = guard.choose_mark(messages, *others)
    marked = tuple(guard.marked(each, mark) for each in others)
    text = _render(template, values, guard.marked_messages(messages, mark), marked)
    sealed, tokenizer = guard.seal(text, mark)
    # A mark is no more than one of two characters, but JSON may have written it as six.
    return ChatText(sealed, guard.unmarked(text[-6 * _PROMPT_END :], mark)[-_PROMPT_END:], tokenizer)


def _finds(guard: SpecialTextGuard, messages: list[dict[str, Any]], others: tuple[Any, ...]) -> bool:
    try:
        return guard.finds(messages, *others)
    except RecursionError:
        raise ChatTemplateError("the messages are nested too deeply") from None


def _render(template: ChatTemplate, values: ChatValues, messages: list[dict[str, Any]], others: tuple[Any, ...]) -> str:
    tools, documents, extra = others
    return template.render(
        messages,
        add_generation_prompt=values.add_generation_prompt,
        continue_final_message=values.continue_final_message,
        tools=tools,
        documents=documents,
        extra=extra,
        time_limit=_TEMPLATE_SECONDS,
    )
