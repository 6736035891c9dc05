"""The publication of a model host for its fronts, so that they can answer without asking: the models that it runs for
them, clients' shared memory, and which requests are traced.

It looks at what there is and finds what has changed since it looked last. Plain data, but for what it looks at.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from penstock.classic.base import InferModel, says_ready
from penstock.classic.caching.cached_model import uncached
from penstock.classic.classic_model import ClassicModel
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.processes.model_host.messages import Described, Published, RegionFields


def is_classic(model: InferModel) -> bool:
    """Whether it is a classic model, or an ensemble of such: language models tell of their requests in the process that
    has the client."""
    inner = uncached(model)
    if isinstance(inner, EnsembleModel):
        try:
            return all(map(is_classic, inner.step_models().values()))
        except PenstockError:  # one of its models has gone
            return False
    return isinstance(inner, ClassicModel)


def no_model(model: InferModel) -> bool:
    """For servers whose fronts leave none to the host."""
    return False


@dataclass(frozen=True, slots=True)
class Sources:
    """What the host owns."""

    models: ModelStore
    regions: SharedMemoryRegions
    tracing: Tracing
    serves: Callable[[InferModel], bool] = is_classic
    """Which of the models fronts are told of."""


@dataclass(frozen=True, slots=True)
class _Entry:
    model: InferModel
    signature: ModelSignature
    """Another one when an ensemble has been wired again: then there is a new description."""
    described: Described


class Publication:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._keys = 0
        self._published = Published(0, [], [], None)

    @property
    def generation(self) -> int:
        """Of what was found last; 0: nothing yet."""
        return self._published.generation

    @property
    def leaving(self) -> list[str]:
        """Regions of shared memory, as fronts know them."""
        return self._published.leaving

    def look(self) -> list[Described | Published]:
        """What fronts that know all before have to be told now; empty when nothing has changed."""
        described = self._look_at_models()
        sources, last = self._sources, self._published
        models = [(e.described.key, e.model.ready, says_ready(e.model)) for e in self._entries.values()]
        regions = sources.regions
        published = Published(last.generation, models, _regions(regions), sources.tracing.shared(), regions.leaving())
        if published == last:
            return []
        published.generation += 1
        self._published = published
        return [*described, published]

    def whole(self) -> list[Described | Published]:
        """What was found last, for a front that knows nothing."""
        return [*(entry.described for entry in self._entries.values()), self._published]

    def _look_at_models(self) -> list[Described]:
        before, self._entries = self._entries, {}
        new = []
        for model in self._sources.models.models():
            place = model.name, model.version
            entry = before.get(place)
            if entry is None or entry.model is not model or entry.signature is not model.signature:
                if not self._sources.serves(model):
                    continue
                entry = _Entry(model, model.signature, self._described(model))
                new.append(entry.described)
            self._entries[place] = entry
        return new

    def _described(self, model: InferModel) -> Described:
        self._keys += 1
        return Described(
            self._keys,
            model.name,
            model.version,
            model.config.SerializeToString(),
            model.takes_infer,
            str(model.model_folder or ""),
            _label_sources(model),
        )


def _label_sources(model: InferModel) -> dict[str, tuple[str, int, str]]:
    """Of an ensemble's outputs without label files of their own."""
    ensemble = uncached(model)
    if not isinstance(ensemble, EnsembleModel):
        return {}
    sources_by_output = {}
    for output in model.config.output:
        source = None if output.label_filename else ensemble.source(output.name)
        if source is not None:
            sources_by_output[output.name] = (source[0].name, source[0].version, source[1])
    return sources_by_output


def _regions(regions: SharedMemoryRegions) -> list[RegionFields]:
    fields = []
    for status, tenant, descriptor in regions.opened():
        file = os.fstat(descriptor)
        of_object = (file.st_dev, file.st_ino, descriptor)
        fields.append(RegionFields(status.name, status.key, status.offset, status.byte_size, tenant, *of_object))
    return fields
