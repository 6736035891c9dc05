"""The batch that a model computes at a time, and the model's interface: little more than a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

NO_INTS: Ints = np.zeros(0, np.int64)
NO_TOKENS: Int32s = np.zeros(0, np.int32)
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(slots=True)
class GroupTables:
    """Block tables of a batch's requests in one of `ModelInfo.kv_groups`."""

    block_ids: Int32s
    """[S, W]: position p of request i lives in block_ids[i, p // block_size], slot p % block_size."""
    first: Ints
    """[S]: entries before it lie behind the group's window and must not be read."""
    end: Ints
    """[S]: entries from it on are not in use; those of `first`..`end` hold all that the batch reads and writes."""


def row_ends(rows: Int32s, start: int, end: int, block_size: int) -> list[int]:
    """Of positions `start`..end-1 of a request: up to which ones the states go to the same row, ascending; `rows` has
    the row of each block. The last one is `end`, and behind the others a checkpoint is."""
    first = start // block_size
    used = rows[first : (end - 1) // block_size + 1]
    changes = np.flatnonzero(used[1:] != used[:-1]) + first + 1
    return [*(changes * block_size).tolist(), end]


@dataclass(slots=True)
class StepBatch:
    """Some tokens of S requests, T in all, that are computed together; tokens of a request are next to each other.

    Arrays and tables may be those of an earlier batch where nothing in them has changed: they are not to be written to.
    """

    token_ids: Int32s
    """[T]; those that a step under way has still to sample are handed to `Model.start`."""
    positions: Ints
    """[T], in their requests."""
    begins: Ints
    """[S + 1]: where the tokens of request i begin; the last entry is T."""
    computed: Ints
    """[S]: tokens of the request that are in the KV cache already."""
    scheduled: Ints
    """[S]: how many follow now."""
    groups: tuple[GroupTables, ...]
    logits_at: Ints
    """[N]: which of the T tokens get logits, and hidden states if those are wanted."""
    adapter_slots: Ints
    """[S]: what `Model.adapter_slot` gave for the request's adapter."""
    wants_hidden: bool
    """Hidden states are asked for, too."""
    features: Floats | None = None
    """[T, width], of a draft head: what it is given beside each token."""
    state_reads: Mapping[int, int] = field(default_factory=lambda: NOTHING)
    """Request -> the row of states that it goes on from, where its table does not say so (`GuessStates`)."""
    state_writes: Mapping[int, Sequence[int]] = field(default_factory=lambda: NOTHING)
    """Request that verifies guesses -> rows for the states behind each of its tokens but the last."""
    grid_positions: Ints | None = None
    """[T, 3]: those that turn queries and keys, as `GridPositions` has them; None: `positions`, three times."""
    embeddings: tuple[Ints, Floats] | None = None
    """[E], which of the T tokens are read as embeddings, and [E, hidden size], these."""


class Outputs(NamedTuple):
    """Valid until the next batch is started in the same buffer."""

    logits: Floats
    """[N, vocab], not scaled."""
    hidden: Floats | None
    """[N, hidden size]: the last hidden states after the final norm; may be None if the batch does not want them."""


class Model(Protocol):
    """A forward pass in one of `num_buffers` buffers: each has room for the inputs and the outputs of a batch.

    One batch computes at a time; meanwhile the next one is prepared in another buffer.
    """

    @property
    def num_buffers(self) -> int:
        """Steps that can be under way."""
        ...

    def adapter_slot(self, key: str) -> int | None:
        """The adapter's number in batches; None: not loaded. Never called for the base model, whose number is 0."""
        ...

    def prepare(self, buffer: int, batch: StepBatch) -> None:
        """Fills the buffer, while another one may compute."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination), one after the other, all layers. Nothing computes."""
        ...

    def start(self, buffer: int, late: Ints, token_ids: Int32s) -> None:
        """Begins to compute what was prepared, with `token_ids` [L] at the indices `late` [L] of the batch's tokens.
        Nothing computes. Returns at once wherever the device works without this thread."""
        ...

    def wait(self, buffer: int) -> Outputs:
        """The results of the batch that was started; when this returns or raises, it no longer computes."""
        ...
