"""POST /tokenize and /detokenize, and GET /tokenizer_info, as vLLM's server has them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.formats.model_files import read_json_if_any
from penstock.gateway.apis.openai.messages import (
    generation_prompt,
    template_documents,
    template_kwargs,
    template_messages,
)
from penstock.gateway.apis.openai.schemas import CHAT, ChatMessage, ChatRequest
from penstock.gateway.apis.openai.tools import tool_use
from penstock.gateway.generating.answer_shape import check_tool_parser
from penstock.gateway.generating.request_reading import default_model, parse
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import Tokenizer


class TokenizeRequest(ChatRequest, kw_only=True):
    """A text, or what makes the prompt of a chat."""

    model: str = ""
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str = ""


TOKENIZE = {name: neutral for name, neutral in CHAT.items() if name != "add_special_tokens"}
"""Fields that are refused, each with the values that ask for nothing."""


class _Endpoint(ABC):
    def __init__(self, dataplane: DataPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            exchange.read_deadline()
            answer = await self._answer(body, exchange.context)
            await exchange.respond(200, msgspec.json.encode(answer))

    @abstractmethod
    async def _answer(self, body: bytes, context: RequestContext) -> dict[str, object]:
        """Raises PenstockError."""

    async def _model_name(self, name: str, context: RequestContext) -> str:
        """The name of the model, which is found from now on. Raises PenstockError."""
        name = name or default_model(self._settings, context, self._dataplane.models)
        await self._dataplane.models.find(name, Kind.TOKENS, context)
        return name


class Tokenize(_Endpoint):
    async def _answer(self, body: bytes, context: RequestContext) -> dict[str, object]:
        request = parse(body, TokenizeRequest, TOKENIZE)
        name = await self._model_name(request.model, context)
        tokens = await self._tokens(request, name, context)

        def strings(tokenizer: Tokenizer) -> list[str]:
            return [tokenizer.token_of(token_id) or "" for token_id in tokens]

        shown = None
        if request.return_token_strs:
            shown = await self._dataplane.with_tokenizer(name, len(tokens), context, strings)
        length = self._dataplane.model(name, context).info.context_length
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": shown}

    async def _tokens(self, request: TokenizeRequest, name: str, context: RequestContext) -> list[int]:
        if request.prompt is None and not request.messages:
            raise InvalidRequestError("Missing required parameter: prompt or messages.", param="messages")
        if request.prompt is None:
            return await self._chat_tokens(request, name, context)
        if request.messages:
            raise InvalidRequestError("prompt and messages exclude each other.", param="prompt")
        add = request.add_special_tokens is not False
        return await self._dataplane.text_prompt(name, request.prompt, context, add_special_tokens=add)

    async def _chat_tokens(self, request: TokenizeRequest, name: str, context: RequestContext) -> list[int]:
        if request.add_special_tokens:
            message = "add_special_tokens is not supported for messages: the chat template adds them."
            raise UnsupportedError(message, param="add_special_tokens")
        opens, continues = generation_prompt(request)
        model = self._dataplane.model(name, context)
        use = tool_use(request, context)
        check_tool_parser(model.parsers, use)
        prompt = await self._dataplane.chat_prompt(
            name,
            template_messages(request.messages, context, model.template_roles, reads_images=model.reads_images),
            context,
            add_generation_prompt=opens,
            continue_final_message=continues,
            tools=use.shown if use.tools else None,
            documents=template_documents(request, model.template_variables),
            template_kwargs=template_kwargs(request, model.template_variables, context),
        )
        return prompt.token_ids


class Detokenize(_Endpoint):
    async def _answer(self, body: bytes, context: RequestContext) -> dict[str, object]:
        request = parse(body, DetokenizeRequest, {})
        name, tokens = await self._model_name(request.model, context), request.tokens
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._dataplane.model(name, context).info.vocab_size:
            raise InvalidRequestError("tokens: a token id is not in the vocabulary.", param="tokens")

        def text(tokenizer: Tokenizer) -> str:
            return tokenizer.decode(tokens, skip_special_tokens=False)

        return {"prompt": await self._dataplane.with_tokenizer(name, len(tokens), context, text)}


_OF_ITS_MAKER = frozenset({"auto_map", "name_or_path"})
"""Settings that are about files of the machine on which the model was made."""


async def tokenizer_info(dataplane: DataPlane, settings: AppSettings, exchange: Exchange) -> None:
    """What the model's tokenizer_config.json says, with the chat template that is used. `model` may be left out where
    there is only one."""
    name = exchange.query.get("model") or default_model(settings, exchange.context, dataplane.models)
    model = dataplane.models.language(name, exchange.context).model
    config = {} if model.texts is None else await asyncio.to_thread(_config_of, Path(model.texts.folder))
    template = model.chat_template
    fields = {"tokenizer_class": None, **config, **model.tokenizer.special_tokens}
    fields["chat_template"] = None if template is None else template.source
    await exchange.respond(200, msgspec.json.encode(fields))


def _config_of(folder: Path) -> dict[str, Any]:
    """Raises EngineError."""
    config = read_json_if_any(folder / "tokenizer_config.json")
    return {name: value for name, value in config.items() if name not in _OF_ITS_MAKER and not name.endswith("_file")}
