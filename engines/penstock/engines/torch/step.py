"""A step as tensors: the flat tokens of all its requests, and which of them attend together.

Requests with one token each (decodes) attend in groups of about equal length, everything else by itself. Tokens are put
in that order, so that what attends together is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

_MOST_SCORES = 1 << 22
"""Pairs of a query and a key, over all requests of a group: bounds the mask and, times the heads, the scores."""
_MOST_KEYS = 1 << 16
"""Keys gathered for a group of decodes."""
_SLACK = 64
"""A group's longest context has at most twice the keys of its shortest, and these besides."""


@dataclass(frozen=True, slots=True)
class Group:
    """`count` consecutive tokens of each of some requests, in [start, stop) of the step's tokens."""

    start: int
    stop: int
    positions: Tensor
    """[requests, count], of the tokens in their requests."""
    slots: Tensor
    """[requests, K]: where keys and values of positions 0..K-1 lie. A shorter context's row ends with its own last
    slot over and over: what is masked is multiplied by zero, so it must not be another's NaN."""
    whole: bool
    """One request whose context is these tokens: plain causal attention."""
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.positions)

    def binding(self, window: int | None) -> int:
        """The window, or 0 where no token of the group has as many before it."""
        return window if window is not None and window < self.slots.shape[1] else 0

    def mask(self, window: int) -> Tensor | None:
        """bool [requests, 1, count, K]: causal, and within the window if that is not 0. None: everything is seen."""
        if window not in self.masks:
            keys = torch.arange(self.slots.shape[1], device=self.slots.device)
            queries = self.positions[:, None, :, None]
            seen = keys <= queries
            if window:
                seen &= keys > queries - window
            self.masks[window] = None if self.num_requests == 1 and len(self.positions[0]) == 1 and not window else seen
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens in the order of the groups."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slot_mapping: Tensor
    """[T]: where a token's keys and values are written."""
    groups: list[Group]
    owners: Ints
    """[T]: the request of each token, by its index among those that were given."""
    begins: Ints
    """For each request, in the order that they were given: the index of its first token in this step."""


def make_step(
    tokens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    block_size: int,
    rows: Ints,
    computed: Ints,
    scheduled: Ints,
    device: torch.device,
) -> Step:
    """Of S requests: their `rows` [S] in `tokens` and `block_tables`, which go on by position and by block; how many
    tokens of each are `computed` before this step and `scheduled` in it, [S]."""
    plan = list(_plan(computed, scheduled))
    owners = np.concatenate([np.repeat(requests, count) for requests, _, count in plan])
    positions = np.concatenate([(first[:, None] + np.arange(count)).ravel() for _, first, count in plan])
    begins = np.zeros(len(computed), np.int64)
    begins[owners[::-1]] = np.arange(len(owners))[::-1]  # of equal indices the last assignment holds: the first token
    places = rows[owners]
    slots = block_tables[places, positions // block_size] * np.int64(block_size) + positions % block_size
    packed = torch.from_numpy(np.stack([tokens[places, positions], positions, slots])).to(device)
    groups, start = [], 0
    for requests, first, count in plan:
        stop = start + len(requests) * count
        tables = block_tables[rows[requests], : -(-int(first.max() + count) // block_size)]
        groups.append(_group(packed[1], start, stop, first, count, tables, block_size))
        start = stop
    return Step(packed[0], packed[1], packed[2], groups, owners, begins)


def _group(
    positions: Tensor, start: int, stop: int, first: Ints, count: int, tables: npt.NDArray[np.int32], block_size: int
) -> Group:
    own = positions[start:stop].view(-1, count)
    keys = torch.arange(int(first.max()) + count, device=positions.device)
    at = torch.minimum(keys[None], own[:, -1:])
    blocks = torch.from_numpy(tables.astype(np.int64)).to(positions.device)
    slots = blocks.gather(1, at // block_size) * block_size + at % block_size
    return Group(start, stop, own, slots, whole=len(first) == 1 and first[0] == 0)


def _plan(computed: Ints, scheduled: Ints) -> Iterator[tuple[Ints, Ints, int]]:
    """(requests, the position of each one's first token, how many of each) for each group."""
    decodes = np.flatnonzero(scheduled == 1)
    decodes = decodes[np.argsort(computed[decodes], kind="stable")]
    for start, stop in _cuts((computed[decodes] + 1).tolist()):
        group = decodes[start:stop]
        yield group, computed[group], 1
    for i in np.flatnonzero(scheduled > 1).tolist():
        first, end = int(computed[i]), int(computed[i] + scheduled[i])
        while first < end:
            count = min(end - first, max(1, _MOST_SCORES // end))
            yield np.array([i]), np.array([first]), count
            first += count


def _cuts(contexts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of these ascending lengths that make good groups."""
    start = 0
    for i, context in enumerate(contexts):
        too_long = context > 2 * contexts[start] + _SLACK
        if i > start and (too_long or (i + 1 - start) * context > _MOST_KEYS):
            yield start, i
            start = i
    if contexts:
        yield start, len(contexts)
