"""The language models of a front: made of what the supervisor tells of them, with engines that other processes run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorAddress
from penstock.engines.errors import ModelNotFoundError, PenstockError, UnsupportedError
from penstock.engines.host.failure_text import as_load_error
from penstock.gateway.apis.kserve.store import IndexEntry
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language.adapters import Adapter, AdapterSet
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.model_builder import ModelTexts, read_texts, read_tokenizer
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import LoadedModel, TextSettings
from penstock.gateway.processes.fronts.messages import AdapterEntry, FrontModel, Holds, Table
from penstock.gateway.processes.model_host.remote_models import RemoteModels

logger = logging.getLogger("penstock")

Attach = Callable[[DoorAddress], Engine]
_RETRY_SECONDS = 2.0


class _FrontModel:
    """A model with its KServe names."""

    def __init__(self, model: LoadedModel, tensors: dict[tuple[str, int], LanguageModel]) -> None:
        self.model = model
        self.tensors = tensors
        self.leaving_adapters: set[Adapter] = set()

    @property
    def adapter_keys(self) -> list[str]:
        return [adapter.key for adapter in (*self.model.adapters, *self.leaving_adapters)]


class FrontModels:
    """What this front serves now. Lives on the event loop."""

    def __init__(
        self, dataplane: DataPlane, classic: RemoteModels, attach: Attach, tell: Callable[[Holds], None]
    ) -> None:
        """`classic`: models that the supervisor runs. `attach` makes the client of an engine; `tell` is called whenever
        what is held has changed."""
        self.dataplane = dataplane
        self._classic = classic
        self.store = _Store(classic)
        self._attach = attach
        self._tell = tell
        self._revision = 0
        self._routed: frozenset[str] = frozenset()
        self._entries: dict[int, FrontModel] = {}
        self._served: dict[int, _FrontModel] = {}
        self._leaving: dict[int, _FrontModel] = {}
        self._making: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # What is asked for each request

    def serves(self, name: str) -> bool:
        """Whether the model or adapter of this name would answer now."""
        holder = self.dataplane.models.holder(name)
        return holder is not None and holder.model.engine.ready and name not in self._routed

    def has_tensors(self, name: str, version: str) -> bool:
        """The same for KServe, classic models included; `version` "": the newest."""
        if name in self._routed:
            return False
        model = self.store.language_model(name, version)
        return self._classic.has(name, version) if model is None else model.ready

    def all(self) -> Iterable[tuple[int, LoadedModel, Iterable[LanguageModel]]]:
        """Those that still answer requests."""
        for group in (self._served, self._leaving):
            for number, served in group.items():
                yield number, served.model, served.tensors.values()

    # What the supervisor tells

    def apply(self, table: Table) -> None:
        """What is not in the table takes no more requests; what is new does so when it is ready."""
        self._revision = table.revision
        self._routed = frozenset(table.routed)
        self._entries = {entry.id: entry for entry in table.models}
        for number in self._served.keys() - self._entries.keys():
            self._leave(number)
        for number in self._making.keys() - self._entries.keys():
            self._making.pop(number).cancel()
        for number, entry in self._entries.items():
            if number in self._served:
                self._change(self._served[number], entry)
            elif number not in self._making:
                self._making[number] = self._run(self._make(entry.id))
        self._tell_holds()

    def _tell_holds(self) -> None:
        held = (*self._served.values(), *self._leaving.values())
        keys = [key for model in held for key in model.adapter_keys]
        making = [entry for number, entry in self._entries.items() if number in self._making]
        keys += [adapter.key for entry in making for adapter in entry.adapters]
        models = {*self._served, *self._leaving, *self._making}
        self._tell(Holds(revision=self._revision, models=tuple(models), adapters=tuple(keys)))

    async def _make(self, number: int) -> None:
        """Tries until it works, or the model is not wanted any more: meanwhile the supervisor serves it."""
        while not await self._try_to_make(number):  # noqa: ASYNC110 - nothing tells that it would work now
            await asyncio.sleep(_RETRY_SECONDS)
        del self._making[number]
        self._tell_holds()

    async def _try_to_make(self, number: int) -> bool:
        entry = self._entries[number]
        engine = self._attach(entry.engine)
        try:
            texts = await asyncio.to_thread(_read, entry.texts)
            await engine.start()
            entry = self._entries[number]  # it may have changed meanwhile
            served = _FrontModel(_loaded_model(entry, engine, texts), {})
            self.dataplane.models.add(served.model)
        except (PenstockError, ConfigError) as error:
            logger.warning("%s is not served here yet: %s", entry.names[0], error)
            await engine.stop()
            return False
        except Exception as error:  # whatever it is, the supervisor serves the model meanwhile
            logger.error("%s is not served here yet: %s", entry.names[0], as_load_error(error).message)
            await engine.stop()
            return False
        except BaseException:
            await engine.stop()
            raise
        self._served[number] = served
        self._change(served, entry)
        return True

    def _change(self, served: _FrontModel, entry: FrontModel) -> None:
        """Its adapters and KServe names are those of the entry from now on."""
        adapters = served.model.adapters
        entries = {adapter.key: adapter for adapter in entry.adapters}
        for adapter in tuple(adapters):
            if adapter.key not in entries:
                adapters.remove(adapter)
                served.leaving_adapters.add(adapter)
                self._run(self._let_go(served, adapter))
        known = {adapter.key for adapter in adapters}
        for key, item in entries.items():
            if key not in known:
                adapters.put(_adapter(item))
        tensors = {(item.name, item.version): item for item in entry.tensors}
        for name in served.tensors.keys() - tensors.keys():
            del served.tensors[name]
        for name, tensor in tensors.items():
            if name not in served.tensors:
                config = ModelConfig.FromString(tensor.config)
                served.tensors[name] = LanguageModel(
                    self.dataplane,
                    served.model,
                    tensor.name,
                    policy=tensor.policy,
                    version=tensor.version,
                    config=config,
                )
        self._publish_tensors()

    def _publish_tensors(self) -> None:
        self.store.replace(model for served in self._served.values() for model in served.tensors.values())

    async def _let_go(self, served: _FrontModel, adapter: Adapter) -> None:
        await adapter.in_flight.wait_idle()
        served.leaving_adapters.discard(adapter)
        self._tell_holds()

    def _leave(self, number: int) -> None:
        served = self._leaving[number] = self._served.pop(number)
        self.dataplane.models.remove(served.model)
        self._publish_tensors()
        self._run(self._left(number, served))

    async def _left(self, number: int, served: _FrontModel) -> None:
        await served.model.in_flight.wait_idle()
        await served.model.engine.stop()
        del self._leaving[number]
        self._tell_holds()

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Ends what still runs."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for group in (self._served, self._leaving):
            for served in group.values():
                await served.model.engine.stop()


def _read(settings: TextSettings) -> ModelTexts:
    return read_texts(settings, read_tokenizer(settings))


def _loaded_model(entry: FrontModel, engine: Engine, texts: ModelTexts) -> LoadedModel:
    adapters = AdapterSet(map(_adapter, entry.adapters), max_loaded=entry.most_adapters)
    return LoadedModel(
        names=entry.names,
        root=entry.root,
        engine=engine,
        tokenizer=texts.tokenizer,
        chat_template=texts.chat_template,
        metrics=ModelMetrics(entry.names[0], lambda: engine.stats, lambda: engine.ready, adapters),
        default_params=texts.default_params,
        parsers=texts.parsers,
        guard=texts.guard,
        images=texts.images,
        created=entry.created,
        loaded=True,
        adapters=adapters,
        max_num_seqs=entry.max_num_seqs,
        salt_key=entry.salt_key,
    )


def _adapter(entry: AdapterEntry) -> Adapter:
    return Adapter(entry.name, entry.key, Path(entry.folder), entry.created)


class _Store:
    """Implements ModelStore for inference. What is not here, the supervisor has been asked for."""

    ready = True

    def __init__(self, classic: RemoteModels) -> None:
        self._classic = classic
        self._models: dict[tuple[str, str], LanguageModel] = {}

    def replace(self, models: Iterable[LanguageModel]) -> None:
        """These are all language models."""
        by_name: dict[tuple[str, str], LanguageModel] = {}
        for model in sorted(models, key=lambda item: item.version):
            by_name[model.name, str(model.version)] = by_name[model.name, ""] = model
        self._models = by_name

    def language_model(self, name: str, version: str) -> LanguageModel | None:
        return self._models.get((name, version))

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        model = self.language_model(name, version) or self._classic.find(name, version)
        if model is None:  # it has gone since the request came
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        return model

    def versions(self, name: str) -> list[int]:
        return []

    def models(self) -> Iterable[InferModel]:
        return []

    def index(self, *, ready: bool) -> list[IndexEntry]:
        return []

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        raise UnsupportedError("a front loads no models")

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        raise UnsupportedError("a front unloads no models")
