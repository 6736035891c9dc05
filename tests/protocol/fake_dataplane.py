"""A data plane that plays scripts: what each generation yields, step by step, is decided by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Entry, Kind
from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.dataplane import (
    ChatPrompt,
    ChoiceDelta,
    DataPlane,
    GenerateRequest,
    Generation,
    ServedModel,
    TokenLogprob,
    Usage,
)
from penstock.gateway.models.language.generation import DeltaListener
from penstock.gateway.models.language.models import LoadedModel, NameHolder
from penstock.gateway.requests.context import RequestContext
from penstock.kvcache import KVGroup

Step = list[ChoiceDelta] | Exception | asyncio.Event
"""Deltas to give out, an error to raise, or an event to wait for (one that is never set hangs)."""
Script = Callable[[GenerateRequest], Iterable[Step]]

INFO = ModelInfo(
    vocab_size=100, max_model_len=64, kv_groups=(KVGroup(16),), num_blocks=64, eos_token_ids=(0,), runner="scripted"
)
MODEL = ServedModel("tiny", "penstock/tiny", 1_700_000_000, INFO)


def delta(index: int, text: str, finish: str | None = None, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(index, text, fields.pop("token_ids", [len(text)]), finish, **fields)


class ScriptedGeneration(Generation):
    def __init__(self, request: GenerateRequest, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self._prompts = request.prompts
        self._telling: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()
        self.prompt_token_ids = [
            [ord(char) % 100 for char in each] if isinstance(each, str) else each for each in request.prompts
        ]
        self.prompt_logprobs: list[list[TokenLogprob | None]] | None = None
        self.has_images = False
        self.usage = Usage(prompt_tokens=sum(map(len, self.prompt_token_ids)), cached_tokens=1)
        self._copies = 1
        self._tokens_of = [0] * (len(request.prompts) * request.n)

    def prompt_text(self, prompt: int) -> str:
        return "".join(f"<{token_id}>" for token_id in self.prompt_token_ids[prompt])

    def first_token(self, prompt: int) -> tuple[str, bytes]:
        given = self._prompts[prompt]
        text = given[0] if isinstance(given, str) else f"<{given[0]}>"
        return text, text.encode()

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                self.waiting.set()
                await step.wait()
                continue
            for each in step:
                self.usage.completion_tokens += len(each.token_ids)
                self._tokens_of[each.index] += len(each.token_ids)
            return step
        raise StopAsyncIteration

    def listen(self, listener: DeltaListener | None) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._telling = None if listener is None else asyncio.ensure_future(self._tell_all(listener))

    async def _tell_all(self, listener: DeltaListener) -> None:
        try:
            async for deltas in self:
                listener.take(deltas)
                await asyncio.sleep(0)  # `listen(None)` may have come
        except Exception as error:
            listener.fail(error)

    def close(self) -> None:
        self.closed.set()


def words(request: GenerateRequest) -> Iterable[Step]:
    """Each choice says "one two three", a word a step."""
    choices = range(len(request.prompts) * request.n)
    yield [delta(index, "one") for index in choices]
    yield [delta(index, " two") for index in choices]
    yield [delta(index, " three", "stop") for index in choices]


class _Described:
    """A LoadedModel that no engine runs."""

    loaded, ready, max_num_seqs, chat_template, adapters = True, True, 1, None, AdapterSet()

    def __init__(self, model: ServedModel) -> None:
        self.names = (model.name,)
        self.engine = SimpleNamespace(info=model.info, failed=False)
        self.sleep = SimpleNamespace(asleep=False, falls_asleep=False, seconds_left=None)
        self.describe = lambda name, adapter=None: model


class FakeModels(Catalogue):
    """Of these names. Whether they are live and ready is what a test says."""

    def __init__(self, models: tuple[ServedModel, ...]) -> None:
        super().__init__()
        self.by_name = {model.name: model for model in models}
        self._entries = {
            model.name: Entry(model.name, NameHolder(cast("LoadedModel", _Described(model)))) for model in models
        }
        self.is_live = self.is_ready = True

    def loaded(self) -> list[tuple[str, LoadedModel]]:
        return []

    @property
    def live(self) -> bool:
        return self.is_live

    @property
    def ready(self) -> bool:
        return self.is_ready


class FakeDataPlane(DataPlane):
    """Serves one model named `tiny`; keeps the requests and generations it has made."""

    def __init__(self, script: Script = words, models: tuple[ServedModel, ...] = (MODEL,)) -> None:
        self.script = script
        self.models: FakeModels = FakeModels(models)
        self.requests: list[GenerateRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.prompts: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.admit: Exception | asyncio.Event | None = None
        """What `generate` meets before it returns: an error, or an event to wait for."""
        self.generating = asyncio.Event()
        self.cancelled = asyncio.Event()

    def model(self, name: str, context: RequestContext | None = None) -> ServedModel:
        if name not in self.models.by_name:
            self.models.own(name, Kind.TOKENS)  # raises what a request gets
        return self.models.by_name[name]

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
        options = {"opens": add_generation_prompt, "continues": continue_final_message, "kwargs": template_kwargs}
        self.prompts.append((messages, options))
        if messages[-1]["content"] == "refuse me":
            raise InvalidRequestError("The template refuses this.", param="messages")
        return ChatPrompt([ord(char) % 100 for message in messages for char in str(message["content"])], "")

    async def text_prompt(self, model: str, text: str, context: RequestContext, **_: Any) -> list[int]:
        return [ord(char) % 100 for char in text]

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.generating.set()
        if isinstance(self.admit, Exception):
            raise self.admit
        if self.admit is not None:
            try:
                await self.admit.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        generation = ScriptedGeneration(request, self.script(request))
        self.generations.append(generation)
        return generation
