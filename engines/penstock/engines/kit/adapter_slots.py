"""LoRA adapters of an engine: which it holds, how many there is room for, and which layers they may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from penstock.engines.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    UnsupportedError,
)
from penstock.engines.formats.adapter_files import LowRank
from penstock.engines.formats.model_settings import text_name

T = TypeVar("T")


class AdapterSlots(Generic[T]):
    """What an engine keeps of each adapter, by key. A slot is taken from `hold` on, until the key leaves `held`."""

    def __init__(self, num_slots: int, *, no_lora: str | None = None, all_taken: str | None = None) -> None:
        """`num_slots` 0: no LoRA. The others are the words in which an engine says so, and that no slot is left."""
        self._num_slots = num_slots
        self._no_lora = no_lora or "this model was loaded without LoRA: --lora or --lora-directory"
        self._all_taken = all_taken or f"all {num_slots} adapter slots are taken (--max-loras)"
        self._numbers = count(1)
        self.held: dict[str, T] = {}

    def check_free(self, key: str) -> None:
        """Raises UnsupportedError, AlreadyExistsError or OverloadedError where `hold` cannot take this key."""
        if not self._num_slots:
            raise UnsupportedError(self._no_lora, param="lora")
        if key in self.held:
            raise AlreadyExistsError("this adapter is loaded already")
        if len(self.held) >= self._num_slots:
            raise OverloadedError(self._all_taken)

    def hold(self, key: str, adapter: T) -> None:
        """Raises what `check_free` raises."""
        self.check_free(key)
        self.held[key] = adapter

    def new_number(self) -> int:
        """For engines that tell adapters apart by numbers, and remember those of adapters that are gone: above 0, and
        none comes twice."""
        return next(self._numbers)


def load_configured(
    adapters: Mapping[str, str | Path], prepare: Callable[[str, Path], Any], install: Callable[[str, Any], None]
) -> None:
    """Loads the adapters that are there from the start, given as folders by key, with AdapterHost's verbs. What is
    wrong with one is said with its key, for the operator."""
    for key, folder in adapters.items():
        try:
            install(key, prepare(key, Path(folder)))
        except PenstockError as e:
            raise type(e)(f"LoRA adapter {key}: {e.message}") from e


class Adapters(Protocol):
    """The adapters of an engine, with the verbs of AdapterHost."""

    def prepare(self, key: str, folder: Path, /) -> Any: ...
    def install(self, key: str, prepared: Any, /) -> None: ...
    def unload(self, key: str, /) -> None: ...


A = TypeVar("A", bound=Adapters)


class WithAdapters(Generic[A]):
    """Implements AdapterHost for an engine that has them."""

    _adapters: A

    def prepare_adapter(self, key: str, folder: Path) -> Any:
        return self._adapters.prepare(key, folder)

    def install_adapter(self, key: str, prepared: Any) -> None:
        self._adapters.install(key, prepared)

    def unload_adapter(self, key: str) -> None:
        self._adapters.unload(key)


class LinearLayer(Protocol):
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...


def fitting_layers(layers: Mapping[str, LowRank], targets: Mapping[str, LinearLayer]) -> dict[str, LowRank]:
    """An adapter's `layers` by the paths of the model's. An adapter of a model that also takes images names the layers
    of the language model otherwise, and may change others, which no text goes through: these are left out.

    Raises InvalidRequestError for a layer that the model lacks or has with other sizes.
    """
    fitting: dict[str, LowRank] = {}
    for path, layer in layers.items():
        name = path if path in targets else text_name(path)
        if name is None:
            continue
        name = f"model.{name}" if name.startswith("layers.") and name not in targets else name
        if name in fitting:
            raise InvalidRequestError(f"the adapter has {name[:200]} twice, by different names")
        _check(path, layer, targets.get(name))
        fitting[name] = layer
    if not fitting:
        raise InvalidRequestError("the adapter changes no layer of the language model")
    return fitting


def _check(path: str, layer: LowRank, target: LinearLayer | None) -> None:
    if target is None:
        raise InvalidRequestError(f"the model has no linear layer {path[:200]} that an adapter could change")
    if (layer.a.shape[1], layer.b.shape[0]) != (target.inputs, target.outputs):
        raise InvalidRequestError(
            f"the adapter's {path} has {layer.a.shape[1]} inputs and {layer.b.shape[0]} outputs, the model's has "
            f"{target.inputs} and {target.outputs}"
        )
