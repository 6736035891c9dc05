"""The data plane, which all protocols call to generate: OpenAI's and the others over HTTP, KServe over HTTP and gRPC.
From here on down nothing knows a protocol."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.engines.contract.messages import AddRequest, ImageInput, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
)
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.adapters import Adapter
from penstock.gateway.models.language.choice_output import Candidate, ChoiceDelta, TokenLogprob
from penstock.gateway.models.language.generate_request import GenerateRequest, prompt_tokens, tokenized_params
from penstock.gateway.models.language.generation import AcceptedCall, Generation, Usage
from penstock.gateway.models.language.images.reader import RequestImage
from penstock.gateway.models.language.images.sources import ImageSources
from penstock.gateway.models.language.models import LoadedModel, ServedModel
from penstock.gateway.models.language.prompts import ChatValues, chat_text, encode_prompts
from penstock.gateway.requests.context import RequestContext, deadline_exceeded, until
from penstock.gateway.requests.intake import WorkPool, WorkPools
from penstock.gateway.requests.record import Stage, outcome_of
from penstock.tokenizers import ChatTemplateError, Tokenizer

__all__ = [
    "Candidate",
    "ChatPrompt",
    "ChoiceDelta",
    "DataPlane",
    "GenerateRequest",
    "Generation",
    "ServedModel",
    "TokenLogprob",
    "Usage",
]

_T = TypeVar("_T")

_IMAGE_COST = 128 << 20
"""Characters of images that are decoded, or wait for that, at a time."""


class ChatPrompt(NamedTuple):
    token_ids: list[int]
    end: str
    """Its last characters: whether a template has opened the model's thought, for example."""
    images: tuple[ImageInput, ...] = ()


class DataPlane:
    """Validates, encodes and submits what the fronts have read. `models`: the server's names. The model of a request is
    the entry in its context; where no front has looked it up (`Catalogue.find`), it is looked up here."""

    def __init__(
        self,
        models: Catalogue | None = None,
        *,
        request_timeout: float | None = None,
        clamp_max_tokens: bool = True,
        text_pool: WorkPool | None = None,
        salt_key: bytes | None = None,
        image_sources: ImageSources | None = None,
    ) -> None:
        """`clamp_max_tokens`: False: no request for more tokens than the context leaves gets what it leaves (`clamps`).
        `salt_key` makes the salts of tenants; None: a new one."""
        self.models = Catalogue() if models is None else models
        self._text_pool = text_pool or WorkPools().text
        self._image_pool = WorkPool("image data", _IMAGE_COST)
        self.image_sources = image_sources or ImageSources()
        self._request_timeout = request_timeout
        self._clamp_max_tokens = clamp_max_tokens
        self.salt_key = salt_key or secrets.token_bytes(32)

    def model(self, name: str, context: RequestContext | None = None) -> ServedModel:
        """The model or adapter that gets the request of `context`. Raises as `Catalogue.find`."""
        return self.models.language(name, context or RequestContext()).describe(name)

    async def chat_prompt(
        self,
        model: str,
        messages: list[dict[str, Any]],
        context: RequestContext,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        cut: bool = False,
        tenant: str = "",
        cache_salt: str = "",
    ) -> ChatPrompt:
        """Renders the model's chat template and encodes the text. `cut`: the prompt may be too long, since `generate`
        will cut it. `tenant`, `cache_salt`: as the `GenerateRequest` will have them; only requests with the same ones
        use what is kept of its images. Without `tenant` it is the context's. Raises InvalidRequestError, also for
        messages that the template refuses, PermissionDeniedError, OverloadedError, DeadlineExceededError."""
        loaded = self._used_by(context, model)
        values = ChatValues(messages, tools, documents, template_kwargs, add_generation_prompt, continue_final_message)
        if self.models.traffic is not None and context.routed is not None:
            self.models.traffic.rendered(context, values, cut=cut)
        return await self.chat_prompt_on(loaded, values, context, cut=cut, tenant=tenant, cache_salt=cache_salt)

    async def chat_prompt_on(
        self,
        loaded: LoadedModel,
        values: ChatValues,
        context: RequestContext,
        *,
        cut: bool = False,
        tenant: str = "",
        cache_salt: str = "",
    ) -> ChatPrompt:
        """As `chat_prompt`, for a model that was found already."""
        template = loaded.chat_template
        if template is None:
            raise InvalidRequestError(
                f"The model `{loaded.names[0]}` has no chat template; use /v1/completions, or start the server with "
                "--chat-template."
            )

        size = context.record.bytes_in  # of the body, which is little more than the messages
        try:
            context.record.enter(Stage.TEMPLATE)
            async with self._until_deadline(context):
                chat = await self._text_pool.run(size, chat_text, loaded, template, values)
                context.record.enter(Stage.TOKENIZE)
                [token_ids] = await encode_prompts(
                    loaded, [chat.text], self._text_pool, add_special_tokens=False, tokenizer=chat.tokenizer, cut=cut
                )
                if not chat.images:
                    return ChatPrompt(token_ids, chat.end)
                await self.image_sources.load(chat.images, context)
                salt = self._salt(loaded, tenant or context.tenant, cache_salt)
                return await self._with_images(loaded, ChatPrompt(token_ids, chat.end), chat.images, salt, cut=cut)
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), param="messages") from None

    async def _with_images(
        self, loaded: LoadedModel, prompt: ChatPrompt, images: Sequence[RequestImage], salt: str, *, cut: bool
    ) -> ChatPrompt:
        reader = loaded.image_reader
        if reader is None:
            raise InvalidRequestError("This model reads text only.", param="messages")
        length = sys.maxsize if cut else loaded.engine.info.context_length
        token_ids, inputs = await reader.placed(prompt.token_ids, images, length, self._image_pool, salt)
        return ChatPrompt(token_ids, prompt.end, inputs)

    def _used_by(self, context: RequestContext, name: str) -> LoadedModel:
        """The model, which is noted in the request's record. Raises as `model`."""
        model, adapter = self.models.language(name, context)
        if not context.record.target:
            context.record.model = model.names[0] if adapter is None else adapter.name
        return model

    async def text_prompt(
        self, model: str, text: str, context: RequestContext, *, add_special_tokens: bool = True, cut: bool = False
    ) -> list[int]:
        """Encodes a text. `cut`: it may be too long, since the caller will cut it. Raises as `chat_prompt`."""
        loaded = self._used_by(context, model)
        context.record.enter(Stage.TOKENIZE)
        async with self._until_deadline(context):
            [token_ids] = await encode_prompts(
                loaded, [text], self._text_pool, add_special_tokens=add_special_tokens, cut=cut
            )
            return token_ids

    async def with_tokenizer(
        self, model: str, size: int, context: RequestContext, work: Callable[[Tokenizer], _T]
    ) -> _T:
        """The result of `work` with a model's tokenizer, in a thread. `size`: characters or tokens that it works on.
        Raises as `chat_prompt`."""
        loaded = self._used_by(context, model)
        context.record.enter(Stage.TOKENIZE)
        async with self._until_deadline(context):
            return await self._text_pool.run(size, work, loaded.tokenizer)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns with the first output, or the first pulse. So all that can be refused has been refused before the
        response starts.

        Raises InvalidRequestError and errors derived from it for values that do not fit the model, OverloadedError,
        DeadlineExceededError, EngineError.
        """
        context, traffic = request.context, self.models.traffic
        model, adapter = self.models.language(request.model, context)
        call = traffic.accepted(request) if traffic is not None and context.routed is not None else None
        return await self._generate(model, adapter, request, call)

    async def generate_on(
        self, model: LoadedModel, request: GenerateRequest, *, adapter: str | None = None
    ) -> Generation:
        """As `generate`, for a model that was found already and one of its adapters; `request.model` is not read."""
        return await self._generate(model, None if adapter is None else model.adapters.named(adapter), request)

    async def _generate(
        self,
        model: LoadedModel,
        adapter: Adapter | None,
        request: GenerateRequest,
        call: AcceptedCall | None = None,
    ) -> Generation:
        used = [model.in_flight] if adapter is None else [model.in_flight, adapter.in_flight]

        def end() -> None:
            for counter in used:
                counter.end()

        for counter in used:  # before anything is awaited: from now on unloading waits for this call
            counter.begin()
        try:
            _check_supported(request.params, model.engine.info)
            record = request.context.record
            if not record.target:
                record.model = model.names[0] if adapter is None else adapter.name
            record.enter(Stage.TOKENIZE)
            async with self._until_deadline(request.context):
                await model.sleep.awake()
                prompts = await prompt_tokens(model, request, self._text_pool)
                if request.unread_images:
                    request, prompts = await self._placed(model, request, prompts)
                params = await tokenized_params(model, request, self._text_pool)
            info = model.engine.info  # if it has just woken up, its cache may be smaller than before
            adds = [self._add(model, adapter, request, params, prompt, info) for prompt in prompts]
            most = request.params.max_tokens  # 0 if the caller names no limit: the context may leave much
            budgets = [min(most, info.context_length - len(prompt)) * request.n for prompt in prompts]
            request.context.pay_tokens(sum(map(len, prompts)) + sum(budgets))
            record.enter(Stage.ENGINE)
            stream = model.engine.submit(adds)
        except BaseException as error:
            end()
            if call is not None:
                call.end(outcome_of(error))
            raise
        ids = [add.ids for add in adds]
        engine = model.engine
        generation = Generation(
            stream,
            model.tokenizer,
            request,
            prompts,
            ids,
            model.metrics,
            engine.abort,
            end,
            admitted=lambda: stream.is_taken_in(engine.stats),
            call=call,
        )
        try:
            return await generation.begin()
        except BaseException:
            generation.close()
            raise

    async def _placed(
        self, model: LoadedModel, request: GenerateRequest, prompts: list[list[int]]
    ) -> tuple[GenerateRequest, list[list[int]]]:
        [token_ids] = prompts
        salt = self._salt(model, request.tenant, request.cache_salt)
        prompt = await self._with_images(model, ChatPrompt(token_ids, ""), request.unread_images, salt, cut=False)
        return replace(request, images=prompt.images, unread_images=()), [prompt.token_ids]

    def _add(
        self,
        model: LoadedModel,
        adapter: Adapter | None,
        request: GenerateRequest,
        params: SamplingParams,
        prompt: list[int],
        info: ModelInfo,
    ) -> AddRequest:
        """The message for one prompt. `params`: the result of `tokenized_params`."""
        max_tokens = _max_tokens(params, prompt, info, clamp=self._clamp_max_tokens and request.clamps)
        min_tokens = min(params.min_tokens, max_tokens)
        params = msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)
        return AddRequest(
            ids=model.engine.new_ids(1 if _are_alike(params) else request.n),
            prompt_token_ids=prompt,
            params=params,
            arrival_time=time.monotonic(),
            deadline=self._deadline(request.context),
            priority=request.level,
            background=request.context.background,
            tenant=request.tenant,
            cache_salt=self._salt(model, request.tenant, request.cache_salt),
            cache_retention=request.cache_retention,
            adapter="" if adapter is None else adapter.key,
            traced=request.context.record.stages is not None,
            session=request.session,
            label=request.context.id,
            images=request.images,
        )

    def _salt(self, model: LoadedModel, tenant: str, caller_salt: str) -> str:
        """Of the prefix cache, and of what is kept of images. Tenants cannot share these, nor guess each other's salt.
        A caller's own salt divides those of its tenant further."""
        if not tenant and not caller_salt:
            return ""
        parts = f"{len(tenant)}:{tenant}{caller_salt}".encode("utf-8", "surrogatepass")
        return hmac.new(model.salt_key or self.salt_key, parts, hashlib.sha256).hexdigest()

    def _deadline(self, context: RequestContext) -> float | None:
        """Of time.monotonic(): the caller's, or the server's own where that is earlier."""
        if self._request_timeout is None or context.background:
            return context.deadline
        own = context.arrival + self._request_timeout
        return own if context.deadline is None else min(own, context.deadline)

    def _until_deadline(self, context: RequestContext) -> AbstractAsyncContextManager[object]:
        """Bounds what is done before the engine has the request; after that the engine keeps the deadline. Raises
        DeadlineExceededError."""
        deadline = self._deadline(context)
        return until(deadline, deadline_exceeded())


def _are_alike(params: SamplingParams) -> bool:
    """Whether all choices of a prompt are the same, so that one is computed. A logits processor is another package's,
    and may draw numbers of its own."""
    return not params.is_random and not params.processors


def _check_supported(params: SamplingParams, info: ModelInfo) -> None:
    if not info.supports_logprobs and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise UnsupportedError(f"The {info.runner} engine has no logprobs.", param="logprobs")


def _max_tokens(params: SamplingParams, prompt: list[int], info: ModelInfo, *, clamp: bool) -> int:
    """What the caller asks for, or what the context leaves, but never less than `min_tokens`. Raises
    InvalidRequestError, ContextLengthError."""
    room = info.context_length - len(prompt)
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    if room < max(1, params.min_tokens, 0 if clamp else params.max_tokens):
        completion = f" and {params.max_tokens} in the completion" if params.max_tokens else ""
        fits = f" At most {room} fit behind this prompt." if room > 0 else ""
        raise ContextLengthError(
            f"This model's maximum context length is {info.context_length} tokens. However, you requested "
            f"{len(prompt) + params.max_tokens} tokens ({len(prompt)} in the prompt{completion}). Please reduce "
            f"the length of the prompt or the completion.{fits}",
            param="prompt",
        )
    return min(params.max_tokens, room) or room
