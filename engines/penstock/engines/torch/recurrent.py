"""Recurrent layers of a step: their rows of states, which tokens are computed together, and the calls of the layers.

A recurrent layer of transformers takes hidden states [requests, tokens, size] and a cache object, whose states it reads
and replaces. So requests with equally many tokens are computed together, and a chunk is cut at each checkpoint: the
state behind it has a row of its own. The model itself runs without a cache; only these layers are handed one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.batch import Ints, StepBatch, row_ends
from penstock.engines.torch.config import fresh_tensor

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers that have states, by transformers' names; the hybrid ones have attention, too."""
OLDEST = (5, 24)
"""Of transformers, for these: older ones forget the state when a prompt goes on in a second chunk."""

Forward = Callable[..., Any]
_HANDLER = "penstock_recurrent"
_CACHE = "cache"
"""Parameter of all layers that use one."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One of a layer's states."""

    kind: str
    """`conv_states` or `recurrent_states`, of transformers' cache."""
    index: int
    """Among the layer's states of this kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


StateLayouts = Mapping[nn.Module, Sequence[StateLayout]]


def bytes_of_row(layouts: StateLayouts) -> int:
    """Of one request's states in all layers."""
    return sum(layout.num_bytes for states in layouts.values() for layout in states)


class StatePiece(NamedTuple):
    """Equally many tokens of some requests, without a checkpoint between those of one."""

    tokens: Tensor
    """[requests, count]: places in the step."""
    reads: Tensor | None
    """[requests]: rows. None: nothing is before these tokens."""
    writes: Tensor
    """[requests]: rows."""


def plan_pieces(batch: StepBatch, places: Ints, block_size: int, device: torch.device) -> Iterator[StatePiece]:
    """In the order in which they are computed: a piece ends where the row changes, and where guesses are verified
    behind each token. `places`: as in `StepTensors`; the last of the batch's groups has the rows."""
    rows, starts, ends = batch.groups[-1].block_ids, batch.computed, batch.computed + batch.scheduled
    all_stops = [
        list(range(start + 1, end + 1)) if i in batch.state_writes else row_ends(rows[i], start, end, block_size)
        for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]
    for number in range(max(map(len, all_stops))):
        stops = np.array([of_request[min(number, len(of_request) - 1)] for of_request in all_stops])
        counts = stops - starts
        for count, is_first in sorted(set(zip(counts.tolist(), (starts == 0).tolist(), strict=True))):
            if not count:  # requests whose tokens are all planned
                continue
            chosen = np.flatnonzero((counts == count) & ((starts == 0) == is_first))
            at = (batch.begins[chosen] + starts[chosen] - batch.computed[chosen])[:, None] + np.arange(count)
            reads, writes = (
                [_row_behind(batch, rows, i, int(positions[i]) - 1, block_size) for i in chosen.tolist()]
                for positions in (starts, stops)
            )
            yield StatePiece(
                torch.from_numpy(places[at]).to(device),
                None if is_first else torch.tensor(reads, device=device),
                torch.tensor(writes, device=device),
            )
        starts = stops


def _row_behind(batch: StepBatch, rows: npt.NDArray[np.int32], request: int, position: int, block_size: int) -> int:
    """Which row has the state behind a position of a request, once it is computed."""
    token = position - int(batch.computed[request])
    if token < 0 and request in batch.state_reads:
        return batch.state_reads[request]
    beside = batch.state_writes.get(request, ())
    return beside[token] if 0 <= token < len(beside) else int(rows[request, position // block_size])


class RecurrentHandler(Protocol):
    """Answers the calls of a model's recurrent layers."""

    def advance(self, module: nn.Module, forward: Forward, hidden: Tensor, options: dict[str, Any]) -> Any:
        """`hidden` [1, T, size]; gives the layer's output for these tokens. `forward` is the layer's own, `options`
        what else the model passes."""
        ...


def catch_calls(model: nn.Module) -> list[nn.Module]:
    """Puts `RecurrentHandler`s between the model and all layers that use a cache, attention among them; as long as a
    layer has no handler, nothing changes for it. Returns these layers."""
    users = [module for module in model.modules() if _CACHE in inspect.signature(module.forward).parameters]
    innermost = [module for module in users if not any(part in users for part in list(module.modules())[1:])]
    for module in innermost:
        names = list(inspect.signature(module.forward).parameters)
        module.forward = partial(_dispatch, module, module.forward, names)
    return innermost


def set_handler(modules: Sequence[nn.Module], handler: RecurrentHandler | None) -> None:
    """From now on it answers for these layers; None: they do so themselves."""
    for module in modules:
        setattr(module, _HANDLER, handler)


def _dispatch(module: nn.Module, forward: Forward, names: list[str], *args: Any, **options: Any) -> Any:
    handler: RecurrentHandler | None = getattr(module, _HANDLER, None)
    if handler is None:
        return forward(*args, **options)
    options |= dict(zip(names, args, strict=False))
    return handler.advance(module, forward, options.pop(names[0]), options)


class StateRecorder:
    """Sees which layers keep states when a model runs, and what they keep."""

    def __init__(self, config: PretrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        self._num_layers = int(text.num_hidden_layers)
        self._num_states = int(getattr(text, "number_of_conv_states", 1))
        self.layouts: dict[nn.Module, list[StateLayout]] = {}

    def advance(self, module: nn.Module, forward: Forward, hidden: Tensor, options: dict[str, Any]) -> Any:
        """`RecurrentHandler.advance`. Raises UnsupportedError for layers that `StepStates` cannot call."""
        from transformers.cache_utils import LinearAttentionAndFullAttentionLayer  # not in all of the versions

        layer = LinearAttentionAndFullAttentionLayer(self._num_states)
        output = forward(hidden, **{**options, _CACHE: Cache(layers=[layer] * self._num_layers)})
        layouts = [
            StateLayout(kind, index, tuple(state.shape[1:]), state.dtype)
            for kind in ("conv_states", "recurrent_states")
            for index, state in getattr(layer, kind).items()
            if state is not None
        ]
        if not layouts:
            return output
        more = [name for name, value in options.items() if isinstance(value, Tensor | tuple | list)]
        if more or not isinstance(output, Tensor) or output.shape[:2] != hidden.shape[:2] or module in self.layouts:
            raise UnsupportedError(f"its recurrent layers are of an unknown form: {type(module).__name__}")
        self.layouts[module] = layouts
        _free_time_steps(module)
        return output


def _free_time_steps(module: nn.Module) -> None:
    """Mamba-2: transformers clamps the steps of a chunk, not that of a single token, so tokens would depend on how they
    were cut. vLLM clamps none."""
    if hasattr(module, "time_step_limit"):
        module.time_step_limit = (0.0, math.inf)  # type: ignore[assignment]


class TorchStates:
    """Row r of a layer's state is `[r]` of its table."""

    def __init__(self, layouts: StateLayouts, num_rows: int, device: torch.device) -> None:
        self.tables = {
            module: [(layout, fresh_tensor((num_rows, *layout.shape), layout.dtype, device)) for layout in states]
            for module, states in layouts.items()
        }


class StepStates:
    """Answers the layers' calls during one forward pass at a time; `pieces` is set before it."""

    pieces: Sequence[StatePiece]

    def __init__(self, states: TorchStates, config: PretrainedConfig) -> None:
        self._states = states
        self._num_layers = int(config.get_text_config(decoder=True).num_hidden_layers)

    def advance(self, module: nn.Module, forward: Forward, hidden: Tensor, options: dict[str, Any]) -> Tensor:
        """`RecurrentHandler.advance`"""
        from transformers.cache_utils import LinearAttentionLayer  # as above

        tables = self._states.tables[module]
        output: Tensor | None = None
        for piece in self.pieces:
            layer = LinearAttentionLayer(1 + max(layout.index for layout, _ in tables))
            _fill(layer, tables, piece)
            cache = Cache(layers=[layer] * self._num_layers)
            part = forward(hidden[0, piece.tokens], **{**options, _CACHE: cache})
            for layout, table in tables:
                table[piece.writes] = getattr(layer, layout.kind)[layout.index]
            if output is None:
                output = part.new_empty(1, hidden.shape[1], part.shape[-1])
            output[0, piece.tokens] = part
        assert output is not None, "a step has tokens"
        return output


def _fill(layer: Any, tables: Sequence[tuple[StateLayout, Tensor]], piece: StatePiece) -> None:
    """With states that the layer may write to. Those of first tokens are zeros, and said not to be there."""
    for layout, table in tables:
        if piece.reads is None:
            state = table.new_zeros(len(piece.tokens), *layout.shape)
        else:
            state = table[piece.reads]
        getattr(layer, layout.kind)[layout.index] = state
        getattr(layer, f"is_{layout.kind}_initialized")[layout.index] = True
        if layout.kind == "conv_states":
            layer.conv_kernel_size[layout.index] = layout.shape[-1]
    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, piece.reads is not None)
