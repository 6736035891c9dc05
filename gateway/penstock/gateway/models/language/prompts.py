"""Prompts: chats as texts, texts as token ids, and what is done with those that are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.gateway.models.language.images.reader import RequestImage, take_images
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import (
    ChatTemplate,
    ChatTemplateError,
    PromptTooLong,
    SealedTokenizer,
    SpecialTextGuard,
    Tokenizer,
    TokenizerError,
)

Side = Literal["left", "right"]
WHAT_FITS = -1
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Truncation:
    tokens: int
    """Most that are kept; -1: what the context has room for."""
    side: Side = "left"
    """Where the others are taken away."""

    def applied(self, prompt: list[int], context_length: int, max_tokens: int) -> list[int]:
        """`max_tokens` 0: room for one is left."""
        most = self.tokens if self.tokens != WHAT_FITS else max(context_length - max(max_tokens, 1), 1)
        if len(prompt) <= most:
            return prompt
        return prompt[-most:] if self.side == "left" else prompt[:most]


def truncation(tokens: int | None, side: Side | None) -> Truncation | None:
    """Raises InvalidRequestError."""
    if tokens is None:
        return None
    if tokens != WHAT_FITS and not 1 <= tokens <= _MOST:
        message = "truncate_prompt_tokens must be at least 1, or -1 for what fits."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return Truncation(tokens, side or "left")


_TEMPLATE_SECONDS = 10.0
_PROMPT_END = 100


@dataclass(frozen=True, slots=True)
class ChatText:
    text: str
    """To be encoded with `tokenizer`, which may have other names for special tokens than the model's own."""
    end: str
    """The last characters of the prompt."""
    tokenizer: Tokenizer | SealedTokenizer
    images: Sequence[RequestImage] = ()
    """In the order of their places in the text."""


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
    images = take_images(messages)
    rest = (values.tools, values.documents, values.extra)
    guard = model.guard
    if guard is not None and _finds(guard, messages, rest):
        return replace(_guarded_text(guard, template, values, messages), images=images)
    text = _render(template, values, messages, rest)
    return ChatText(text, text[-_PROMPT_END:], model.tokenizer, images)


def _guarded_text(
    guard: SpecialTextGuard, template: ChatTemplate, values: ChatValues, messages: list[dict[str, Any]]
) -> ChatText:
    rest = (values.tools, values.documents, values.extra)
    mark = guard.choose_mark(messages, *rest)
    marked = tuple(guard.marked(value, mark) for value in rest)
    text = _render(template, values, guard.marked_messages(messages, mark), marked)
    sealed, tokenizer = guard.seal(text, mark)
    # A mark is no more than one of two characters, but JSON may have written it as six.
    return ChatText(sealed, guard.unmarked(text[-6 * _PROMPT_END :], mark)[-_PROMPT_END:], tokenizer)


def _finds(guard: SpecialTextGuard, messages: list[dict[str, Any]], rest: tuple[Any, ...]) -> bool:
    try:
        return guard.finds(messages, *rest)
    except RecursionError:
        raise ChatTemplateError("the messages are nested too deeply") from None


def _render(template: ChatTemplate, values: ChatValues, messages: list[dict[str, Any]], rest: tuple[Any, ...]) -> str:
    tools, documents, extra = rest
    return template.render(
        messages,
        add_generation_prompt=values.add_generation_prompt,
        continue_final_message=values.continue_final_message,
        tools=tools,
        documents=documents,
        extra=extra,
        time_limit=_TEMPLATE_SECONDS,
    )


_INLINE_CHARS = 4096
"""Up to this many characters of a call are encoded on the event loop (well under a millisecond); more in a pool."""
TOKENS_OF_A_CALL = 1_048_576
"""Of all texts of a call together, unless the context alone is longer: no more than may wait by default."""


async def encode_prompts(
    model: LoadedModel,
    texts: Sequence[str],
    pool: WorkPool,
    *,
    add_special_tokens: bool,
    tokenizer: Tokenizer | SealedTokenizer | None = None,
    cut: bool = False,
) -> list[list[int]]:
    """Token ids of each text. `tokenizer`: the model's if None; `cut`: the caller will cut texts that do not fit.

    Raises InvalidRequestError for text that cannot be encoded, OverloadedError, and, without `cut`, ContextLengthError
    for a text that is so long that encoding all of it would be wasted. The caller checks the length of the others.
    """
    tokenizer = tokenizer or model.tokenizer
    size = sum(map(len, texts))
    if size <= _INLINE_CHARS:
        return _encode_all(model, tokenizer, texts, add_special_tokens, cut)
    return await pool.run(size, _encode_all, model, tokenizer, texts, add_special_tokens, cut)


def _encode_all(
    model: LoadedModel,
    tokenizer: Tokenizer | SealedTokenizer,
    texts: Sequence[str],
    add_special_tokens: bool,
    cut: bool,
) -> list[list[int]]:
    context_length = model.engine.info.context_length
    limit = context_length - 1  # leaves room for one token of the completion
    room = total = max(limit, TOKENS_OF_A_CALL)
    limit = total if cut else limit
    prompts = []
    for text in texts:
        try:
            ids = tokenizer.encode(text, add_special_tokens, limit=min(limit, room))
        except PromptTooLong as error:
            raise _too_long(error, context_length) if error.limit == limit else _too_many(total) from None
        except TokenizerError as error:
            raise InvalidRequestError(str(error), param="prompt") from None
        room -= len(ids)
        if room < 0 and len(texts) > 1:
            raise _too_many(total)
        prompts.append(ids)
    return prompts


def _too_long(error: PromptTooLong, context_length: int) -> ContextLengthError:
    length = f"more than {error.limit} tokens" if error.certain else "more characters than are expected to fit"
    return ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, your prompt has {length}. Please "
        "reduce the length of the prompt.",
        param="prompt",
    )


def _too_many(total: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The prompts of this call have more than {total} tokens together. Please send them in several calls.",
        param="prompt",
    )
