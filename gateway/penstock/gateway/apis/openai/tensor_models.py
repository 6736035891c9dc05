"""Models of a repository that take and give text as tensors, in the form of Triton's vLLM backend, for the OpenAI API.

Any model qualifies, above all Python models: inputs `text_input` and `stream`, output `text_output`, and nothing that a
request has to have and this module cannot fill in. What a request says about sampling goes to `sampling_parameters`, as
JSON, or to inputs of its own names. Triton's counterpart: python/openai of triton-inference-server/server.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import cached_property, partial
from typing import Any

import msgspec

from penstock.classic.base import InferModel, paced
from penstock.classic.caching.cached_model import uncached
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.parameters import forwarded_http
from penstock.gateway.apis.kserve.tensor_plane import TensorCall
from penstock.gateway.apis.openai.frames import Frames
from penstock.gateway.apis.openai.messages import template_messages
from penstock.gateway.apis.openai.objects import (
    AssistantMessage,
    ChatChoice,
    CompletionChoice,
    ResponseHead,
    chat_usage,
    new_head,
    spliced,
    usage_object,
)
from penstock.gateway.apis.openai.schemas import (
    CHAT,
    COMPLETION,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    StreamOptions,
)
from penstock.gateway.apis.openai.tensor_requests import (
    OUTPUT,
    check_request,
    echoed_prompt,
    note_ignored,
    only_prompt,
    plain_prompt,
    takes_text,
    tensor_inputs,
)
from penstock.gateway.apis.openai.validation import kept_metadata, with_metadata
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.generating.streams import Collected, collect, stream
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.dataplane import Usage
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.sampling import stop_strings
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Stage
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import ChatTemplate, ChatTemplateError, StopStrings, TextPart, TokenizerError
from penstock.tokenizers.files import read_tokenizer_files

_REFUSAL = (
    "The model `{name}` takes texts and keeps its tokenizer to itself. It can be asked by chats of every API and "
    "/v1/completions, and by nothing that needs its tokens."
)
_TEMPLATE_SECONDS = 10.0
_FINISH = frozenset({"stop", "length"})


class TensorModels:
    """Keeps the names of such models in the catalogue as the repository's are."""

    def __init__(self, kserve: KServe, catalogue: Catalogue, settings: AppSettings) -> None:
        self._kserve = kserve
        self._catalogue = catalogue
        self._settings = settings
        self._known: dict[str, TensorModel] = {}

    def look(self) -> None:
        """To be called whenever models have come or gone."""
        served = [serving.by_version[""] for _, serving in self._catalogue.deployments()]
        newest = {model.name: model for model in served if self._is_ours(model)}
        for name, known in list(self._known.items()):
            if newest.get(name) is not known.model and self._known.pop(name, None) is known:
                self._catalogue.remove(known)
        for name, model in newest.items():
            if name not in self._known:
                self._known[name] = TensorModel(model, self._kserve, self._settings)
                self._catalogue.add(self._known[name])

    def _is_ours(self, model: InferModel) -> bool:
        """Not one whose name a model of another kind has taken."""
        is_free = self._catalogue.model(model.name) in (None, self._known.get(model.name))
        return is_free and not isinstance(uncached(model), LanguageModel) and takes_text(model.signature)


class TensorModel:
    """Implements Upstream for one model, which is found by its name again for each request."""

    apis: tuple[str, ...] = ("chat", "completions")
    owner = "penstock"
    refusal = _REFUSAL
    gives_way = True

    def __init__(self, model: InferModel, kserve: KServe, settings: AppSettings) -> None:
        self.model = model
        self.name = model.name
        self._created = int(time.time())
        self._kserve = kserve
        self._settings = settings

    @property
    def created(self) -> int:
        return self._created

    @property
    def root(self) -> str:
        return self.name

    @property
    def folder(self) -> str:
        folder = self.model.model_folder
        return "" if folder is None else str(folder / str(self.model.version))

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        """Always None: nothing else answers in its place."""
        if api == "chat":
            await self._answer_chat(exchange, parse(body, ChatRequest, CHAT))
        elif api == "completions":
            await self._answer_completion(exchange, parse(body, CompletionRequest, COMPLETION))
        else:
            raise UnsupportedError(f"The model `{self.name}` gives no embeddings.", param="model")
        return None

    @asynccontextmanager
    async def chat(
        self, exchange: Exchange, chat: UpstreamChat, *, pulse: float | None
    ) -> AsyncIterator[UpstreamAnswer | str]:
        """As Upstream has it."""
        request = msgspec.convert({**chat.fields, "model": self.name, "stream": True}, ChatRequest)
        async with self._inference(exchange, request, await self._chat_prompt(request, exchange), pulse) as answer:
            yield answer

    async def _answer_chat(self, exchange: Exchange, request: ChatRequest) -> None:
        context = exchange.context
        request.metadata = kept_metadata(request.metadata, context)
        async with self._inference(
            exchange, request, await self._chat_prompt(request, exchange), self._pulse
        ) as answer:
            if request.stream:
                head = self._head("chatcmpl", "chat.completion.chunk", request)
                frames = _frames(head, request, opening=b'"delta":{"content":', closing=b"}")
                ending = partial(_ending, frames, request, answer, chat_usage)
                await stream(exchange, answer, frames, opening=partial(frames.role, 0, None), ending=ending)
                return
            [collected] = await collect(answer, 1)
            message = AssistantMessage(collected.text)
            choice = ChatChoice(index=0, message=message, logprobs=None, **_end_of(collected))
            usage = chat_usage(answer.usage) if answer.counted else None
            body = spliced(self._head("chatcmpl", "chat.completion", request), choices=[choice], usage=usage)
            await exchange.respond(200, with_metadata(body, request.metadata) if request.metadata else body)

    async def _answer_completion(self, exchange: Exchange, request: CompletionRequest) -> None:
        head = self._head("cmpl", "text_completion", request)
        async with self._inference(exchange, request, only_prompt(request), self._pulse) as answer:
            if request.stream:
                frames = _frames(head, request, opening=b'"text":')
                ending = partial(_ending, frames, request, answer, usage_object)
                await stream(exchange, answer, frames, ending=ending)
                return
            [collected] = await collect(answer, 1)
            choice = CompletionChoice(index=0, text=collected.text, logprobs=None, **_end_of(collected))
            usage = usage_object(answer.usage) if answer.counted else None
            await exchange.respond(200, spliced(head, choices=[choice], usage=usage))

    @property
    def _pulse(self) -> float | None:
        return self._settings.heartbeat_s or None

    def _head(self, prefix: str, kind: str, request: CommonRequest) -> ResponseHead:
        return new_head(prefix, kind, request.model, self._settings.system_fingerprint)

    async def _chat_prompt(self, request: ChatRequest, exchange: Exchange) -> str:
        """Raises PenstockError."""
        return await self._kserve.pools.text.run(
            sum(len(str(message.content)) for message in request.messages), self._rendered, request, exchange.context
        )

    def _rendered(self, request: ChatRequest, context: RequestContext) -> str:
        """In a thread. Raises InvalidRequestError."""
        template = self._template
        messages = template_messages(request.messages, context, frozenset() if template is None else template.roles)
        if template is None:
            return plain_prompt(messages)
        try:
            return template.render(
                template.normalize(messages), add_generation_prompt=True, time_limit=_TEMPLATE_SECONDS
            )
        except ChatTemplateError as error:
            raise InvalidRequestError(f"messages: {error}.", param="messages") from None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """Of the files of a tokenizer in the version's folder or the model's. Blocks. Raises EngineError."""
        folder = self.model.model_folder
        places = () if folder is None else (folder / str(self.model.version), folder)
        try:
            for place in places:
                files = read_tokenizer_files(place)
                if source := files.chat_templates.get("default"):
                    return ChatTemplate(source, files.special_tokens)
        except (TokenizerError, ChatTemplateError) as error:
            raise EngineError(f"The chat template of the model `{self.name}` cannot be used: {error}") from None
        return None

    @asynccontextmanager
    async def _inference(
        self, exchange: Exchange, request: CommonRequest, prompt: str, pulse: float | None
    ) -> AsyncIterator[_Answer]:
        """Raises PenstockError."""
        context = exchange.context
        plane = self._kserve.plane
        exchange.read_deadline()
        model = await plane.find(self.name, "", context)
        check_request(request)
        note_ignored(request, context)
        inner = InferRequest(inputs=tensor_inputs(model.signature, request, prompt, context))
        if self._kserve.header_forward_pattern is not None:
            inner.parameters |= forwarded_http(exchange.scope["headers"], self._kserve.header_forward_pattern)
        call = plane.begin(model, "", inner, context)
        stops = StopStrings(stop_strings(request.stop), bool(request.include_stop_str_in_output))
        usage = Usage()
        answer = _Answer(usage, pulse if request.stream else None)
        answer.deltas = _deltas(_responses(call), stops, echoed_prompt(request, prompt), answer, context)
        async with aclosing(answer):
            yield answer


class _Answer:
    """Implements UpstreamAnswer."""

    deltas: AsyncGenerator[list[ChoiceDelta], None]

    def __init__(self, usage: Usage, pulse: float | None) -> None:
        self.usage = usage
        self.counted = False
        """The model has told how many tokens there are."""
        self._pulse = pulse
        self._next: asyncio.Task[list[ChoiceDelta]] | None = None

    def __aiter__(self) -> _Answer:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        if self._pulse is None:
            return await anext(self.deltas)
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self.deltas))
        done, _ = await asyncio.wait((self._next,), timeout=self._pulse)
        if not done:
            return []
        task, self._next = self._next, None
        return task.result()

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self.deltas.aclose()


async def _responses(call: TensorCall) -> AsyncGenerator[InferResponse, None]:
    if not call.model.signature.decoupled:
        yield await call.infer()
        return
    responses = paced(call.stream())
    try:
        async for response in responses:
            yield response
            if response.final:
                return
    finally:
        responses.close()


async def _deltas(
    responses: AsyncGenerator[InferResponse, None],
    stops: StopStrings,
    prefix: str,
    answer: _Answer,
    context: RequestContext,
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Texts up to the first stop string. Raises PenstockError."""
    finish = "stop"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be cut by the end of a response
    if prefix:
        yield [_delta(prefix)]
    async with aclosing(responses):
        async for response in responses:
            if response.error is not None:
                raise response.error
            if response.outputs is None:
                continue
            outputs = {tensor.name: tensor for tensor in response.outputs}
            if context.record.first_token_at is None:
                context.record.first_token_at = time.monotonic()
                context.record.enter(Stage.DECODING)
            _count(outputs, answer, context)
            finish = _finish_reason(outputs, finish)
            text, stopped_by = stops.push(decoder.decode(_text(outputs)))
            if stopped_by is not None:
                yield [_delta(text, "stop", stopped_by)]
                return
            if text:
                yield [_delta(text)]
    rest = stops.push(decoder.decode(b"", final=True))[0] + stops.flush()
    yield [_delta(rest, finish if stops.matched is None else "stop", stops.matched)]


def _delta(text: str, finish: str | None = None, stopped_by: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(0, text, [], finish, stopped_by, parts=[TextPart(text)] if text else [])


def _text(outputs: Mapping[str, Tensor]) -> bytes:
    """Raises EngineError."""
    output = outputs.get(OUTPUT)
    if output is None or output.array.size == 0:
        return b""
    if output.datatype != "BYTES":
        raise EngineError(f"The model's {OUTPUT} has the datatype {output.datatype} instead of BYTES.")
    if output.array.size > 1:
        raise EngineError(f"The model's {OUTPUT} has {output.array.size} texts in one response instead of one.")
    value = output.array.item()
    return value.encode(errors="replace") if isinstance(value, str) else bytes(value)


def _count(outputs: Mapping[str, Tensor], answer: _Answer, context: RequestContext) -> None:
    """Every response repeats the prompt's tokens, and has its own ones of the answer, as with the vLLM backend."""
    prompt, completion = outputs.get("num_input_tokens"), outputs.get("num_output_tokens")
    if prompt is None or completion is None or not (_is_count(prompt) and _is_count(completion)):
        return
    answer.counted = True
    answer.usage.prompt_tokens = int(prompt.array.item())
    answer.usage.completion_tokens += int(completion.array.item())
    context.record.usage = answer.usage


def _is_count(tensor: Tensor) -> bool:
    return tensor.array.size == 1 and tensor.array.dtype.kind in "iu"


def _finish_reason(outputs: Mapping[str, Tensor], before: str) -> str:
    output = outputs.get("finish_reason")
    if output is None or output.datatype != "BYTES" or output.array.size != 1:
        return before
    value = output.array.item()
    text = value if isinstance(value, str) else bytes(value).decode(errors="replace")
    return text if text in _FINISH else before


def _frames(head: ResponseHead, request: CommonRequest, *, opening: bytes, closing: bytes = b"") -> Frames:
    options = request.stream_options or StreamOptions()
    return Frames(head, 1, opening=opening, closing=closing, announce_usage=bool(options.include_usage))


def _ending(frames: Frames, request: CommonRequest, answer: _Answer, usage: Callable[[Usage], Any]) -> bytes:
    """Without the chunk for the usage where the model does not tell it."""
    shows = request.stream_options is not None and request.stream_options.include_usage and answer.counted
    return frames.end(usage(answer.usage) if shows else None)


def _end_of(collected: Collected) -> dict[str, Any]:
    return {"finish_reason": collected.finish_reason, "stop_reason": collected.stop_reason}
