"""The supervisor's table of language models for its fronts, the doors of their engines, and what fronts still use."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from pathlib import Path

from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorAddress, DoorSpec
from penstock.engines.process.client import ProcessEngine
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.models.language.adapters import Adapter, CallCounter
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.processes.fronts.messages import AdapterEntry, FrontModel, Holds, Table, TensorName

_IPC = "ipc://"
_MOST_MESSAGE_BYTES = 320 << 20
"""A request with images has all their pixels."""
_MOST_UNTAKEN_BYTES = 1 << 30


class Doors:
    def __init__(self, folder: Path, fronts: int) -> None:
        self._folder = folder
        self._clients = 2 * fronts + 2
        """One that takes another's place may come before that one is known to have gone."""
        self._numbers = count(1)

    def new(self) -> DoorSpec:
        """For one more engine."""
        return DoorSpec(
            address=f"{_IPC}{self._folder}/engine-{next(self._numbers)}",
            max_clients=self._clients,
            max_message_bytes=_MOST_MESSAGE_BYTES,
            max_untaken_bytes=_MOST_UNTAKEN_BYTES,
        )


def door_of(engine: Engine) -> DoorAddress | None:
    """None: only the process that has started it can use this engine."""
    door = engine.door if isinstance(engine, ProcessEngine) else None
    return door if door is not None and door.address.startswith(_IPC) else None


class ModelTable:
    """Describes what fronts may serve: loaded language models that stay awake, in processes that others can use."""

    def __init__(self, dataplane: DataPlane, models: ModelStore, *, empty: bool = False) -> None:
        """`empty`: the supervisor alone serves models, since requests load them."""
        self._empty = empty
        self._dataplane = dataplane
        self._models = models
        self._numbers = count(1)
        self._known: dict[int, tuple[LoadedModel, int]] = {}
        """By identity, with the model itself, so that no other one gets the same."""
        self._revisions = count(1)

    def new(self, routed: Collection[str]) -> tuple[Table, Used]:
        """The table of this moment, and what it names."""
        loaded = {id(model): model for _, model in self._dataplane.models.loaded()}
        self._known = {key: known for key, known in self._known.items() if key in loaded}
        used = Used()
        entries = []
        for key, model in loaded.items():
            if key not in self._known:
                self._known[key] = model, next(self._numbers)
            number = self._known[key][1]
            entry = self._entry(model, number)
            if entry is not None:
                entries.append(entry)
                used.models[number] = model.in_flight
                used.adapters |= {adapter.key: adapter.in_flight for adapter in model.adapters}
        table = Table(revision=next(self._revisions), models=tuple(entries), routed=tuple(sorted(routed)))
        return table, used

    def model(self, number: int) -> LoadedModel | None:
        """None where it has gone."""
        return next((model for model, known in self._known.values() if known == number), None)

    def _entry(self, model: LoadedModel, number: int) -> FrontModel | None:
        """None: the supervisor alone serves it."""
        door = door_of(model.engine)
        if self._empty or door is None or model.texts is None or not model.sleep.stays_awake:
            return None
        return FrontModel(
            id=number,
            names=model.names,
            root=model.root,
            created=model.created,
            texts=model.texts,
            engine=door,
            max_num_seqs=model.max_num_seqs,
            salt_key=model.salt_key,
            adapters=tuple(map(_adapter, model.adapters)),
            most_adapters=model.adapters.max_loaded,
            tensors=tuple(_tensor_name(tensor_model) for tensor_model in self._tensors(model)),
        )

    def _tensors(self, model: LoadedModel) -> list[LanguageModel]:
        """Not those whose clients cancel requests by their ids, nor those of whose requests more than sums is kept: all
        requests of these have to be in one process."""
        return [
            candidate
            for candidate in self._models.models()
            if isinstance(candidate, LanguageModel)
            and candidate.loaded_model is model
            and candidate.form.cancels is None
            and candidate.statistics.observer is None
        ]


def _adapter(adapter: Adapter) -> AdapterEntry:
    return AdapterEntry(name=adapter.name, key=adapter.key, folder=str(adapter.folder), created=adapter.created)


def _tensor_name(model: LanguageModel) -> TensorName:
    config = model.config.SerializeToString()
    return TensorName(name=model.name, version=model.version, config=config, policy=model.policy)


class Used:
    """What a table names: the counters of models by number, and of adapters by key."""

    def __init__(self) -> None:
        self.models: dict[int, CallCounter] = {}
        self.adapters: dict[str, CallCounter] = {}


class FrontHolds:
    """What one front may still use: it is not unloaded before the front says so, or has gone."""

    def __init__(self) -> None:
        self._held: dict[int | str, tuple[CallCounter, int]] = {}
        """With the revision of the newest table that names it."""

    def sent(self, table: Table, used: Used) -> None:
        """The front is going to get this table."""
        for number, of_model in used.models.items():
            self._hold(number, of_model, table.revision)
        for key, of_adapter in used.adapters.items():
            self._hold(key, of_adapter, table.revision)

    def _hold(self, key: int | str, counter: CallCounter, revision: int) -> None:
        if key not in self._held:
            counter.hold()
        self._held[key] = counter, revision

    def take(self, holds: Holds) -> None:
        """What the front does not name it does not use, unless a table on its way names it."""
        kept = {*holds.models, *holds.adapters}
        for key, (counter, revision) in tuple(self._held.items()):
            if key not in kept and revision <= holds.revision:
                del self._held[key]
                counter.release()

    def close(self) -> None:
        """The front is gone."""
        for counter, _ in self._held.values():
            counter.release()
        self._held.clear()
