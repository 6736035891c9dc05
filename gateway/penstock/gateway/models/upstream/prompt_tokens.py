"""Prompts as another server's tokens. That server's events tell by tokens what it has cached."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import OverloadedError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.upstream_settings import Api
from penstock.gateway.models.language.models import load_chat_template
from penstock.gateway.models.upstream.request_writing import UpstreamRequest
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import ChatTemplate, ChatTemplateError, Tokenizer, TokenizerError

logger = logging.getLogger("penstock")

_MOST_BODY = 4 << 20
"""Bytes of a request that is rendered; images make some long."""
_MOST_TEXT = 128 << 10
"""Characters that are encoded, from the beginning: about 32,000 tokens. Further ones seldom change the choice."""
_MOST_WAITING = 32 << 20
_TEMPLATE_SECONDS = 2.0


class _Chat(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class _Completion(msgspec.Struct):
    prompt: str | list[str | int | list[int]]


class PromptEncoder:
    """It has a pool of its own: requests for this server's models do not wait behind it."""

    def __init__(self, folder: str) -> None:
        """Reads the tokenizer and the chat template. Raises ConfigError."""
        try:
            self._tokenizer = Tokenizer(Path(folder))
        except TokenizerError as error:
            raise ConfigError(f"tokenizer: {error}") from None
        self._template = load_chat_template(self._tokenizer, None)
        if self._template is not None:
            for template in (self._template, self._template.with_tools):
                template.needs  # noqa: B018  # it renders some chats, which no request should wait for
        self._pool = WorkPool("prompts for other servers", _MOST_WAITING)

    async def tokens(self, request: UpstreamRequest, api: Api) -> Sequence[int]:
        """Of the prompt, or its beginning. None where it cannot be known here: that is for the other server to say."""
        if api == "embeddings" or len(request.body) > _MOST_BODY:
            return ()
        try:
            return await self._pool.run(len(request.body), self._encode, request.body, api)
        except (OverloadedError, msgspec.MsgspecError, ChatTemplateError, TokenizerError) as error:
            logger.debug("a prompt for another server is not encoded: %s", error)
            return ()

    def _encode(self, body: bytes, api: Api) -> Sequence[int]:
        """Blocks."""
        if api == "chat":
            return self._chat_tokens(msgspec.json.decode(body, type=_Chat))
        prompt = msgspec.json.decode(body, type=_Completion).prompt
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt[:_MOST_TEXT])
        first = prompt[0] if prompt else []
        if isinstance(first, str):
            return self._tokenizer.encode(first[:_MOST_TEXT])
        numbers = first if isinstance(first, list) else [item for item in prompt if isinstance(item, int)]
        return numbers if all(0 <= number < 1 << 32 for number in numbers) else ()

    def _chat_tokens(self, chat: _Chat) -> Sequence[int]:
        if self._template is None:
            return ()
        text = _text(self._template.choose(chat.tools, None), chat)
        return self._tokenizer.encode(text[:_MOST_TEXT], add_special_tokens=False)


def _text(template: ChatTemplate, chat: _Chat) -> str:
    """Raises ChatTemplateError."""
    effort = {} if chat.reasoning_effort is None else {"reasoning_effort": chat.reasoning_effort}
    try:
        messages = template.normalize(chat.messages)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ChatTemplateError(f"messages of an unknown form: {error!r}") from None
    return template.render(
        messages,
        add_generation_prompt=True,
        tools=chat.tools,
        extra={**effort, **(chat.chat_template_kwargs or {})},
        time_limit=_TEMPLATE_SECONDS,
    )
