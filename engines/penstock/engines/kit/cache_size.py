"""Settings of a runner, checked and fitted to the memory and the model: context length, KV cache, groups of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.engines.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from penstock.engines.host.memory import parse_memory
from penstock.kvcache import KVGroup, StateGroup
from penstock.kvcache.table import blocks_of_request

_LARGEST = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
}
"""Several times the sizes of any known model. A file with larger ones is damaged, and building such a model would take
all memory before it fails."""


_OF_LAYERS = "intermediate_size"
"""It may be a list with a number for each layer, unless these have to be alike."""


class CacheSettings(Protocol):
    """What the settings of all runners have in common."""

    @property
    def num_blocks(self) -> int | None: ...
    @property
    def kv_cache_memory(self) -> int | str | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...


def check_model_sizes(settings: Mapping[str, Any], *, alike: bool = False) -> None:
    """`settings` is config.json; `alike`: all layers are. Raises UnsupportedError for sizes that no model has."""
    for key, most in _LARGEST.items():
        value = settings.get(key)
        if value is None:
            continue
        is_list = key == _OF_LAYERS and not alike and isinstance(value, list)
        numbers = value if is_list and len(value) == settings.get("num_hidden_layers") else [value]
        if not all(type(number) is int and 0 <= number <= most for number in numbers):
            raise UnsupportedError(f"config.json has {key}={value!r:.40}, which is not a number from 0 to {most}")


def max_model_len(setting: int | None, limit: int | None) -> int:
    """As asked for, or what the model was made for. Raises ContextLengthError when more than that is asked for,
    UnsupportedError when neither is known."""
    length = setting or limit
    if length is None:
        raise UnsupportedError("config.json does not say how long a context can be: max_model_len must be set")
    if limit is not None and length > limit:
        raise ContextLengthError(f"max_model_len={length} is above the model's {limit}", param="max_model_len")
    return int(length)


def num_blocks(
    config: CacheSettings,
    groups: Sequence[KVGroup],
    model_len: int,
    block_bytes: int,
    *,
    free: int,
    share: float,
    beside: int = 0,
) -> int:
    """Of the pool, for all groups: as asked for, or as many as `share` of the `free` bytes hold and max_num_seqs full
    requests can use. `block_bytes`: of one block in all layers of a group; `beside`: bytes of the cache that are no
    blocks, its states in use."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        count = (parse_memory(config.kv_cache_memory, free=free) - beside) // block_bytes
    else:
        usable = config.max_num_seqs * blocks_of_request(groups, model_len, config.max_num_batched_tokens)
        count = min(usable, int((free - beside) * share) // block_bytes)
    least = len(groups)
    if count < least:
        states = f" and {beside} bytes of recurrent states" if beside else ""
        raise UnsupportedError(
            f"the KV cache does not hold {'one block' if least == 1 else f'{least} blocks'} of {block_bytes} bytes"
            + states,
            param="kv_cache_memory",
        )
    return count


def state_interval(setting: int | None, row_bytes: int, block_bytes: int, block_size: int) -> int:
    """Tokens between checkpoints. None: a few whole blocks, so that states take no more memory than keys and values.
    Raises InvalidRequestError for a setting that does not fit the blocks."""
    if setting is None:
        interval = block_size
        while interval < _LONGEST_INTERVAL and row_bytes * block_size > interval * block_bytes:
            interval *= 2
        return interval
    if setting % block_size:
        raise InvalidRequestError(
            f"state_interval={setting} is not a multiple of the {block_size} tokens of a block", param="state_interval"
        )
    return setting


_LONGEST_INTERVAL = 1024
"""Tokens that may have to be computed again, at most, behind a prefix hit."""


class StateSpace(NamedTuple):
    """Memory for recurrent states in the cache: as many checkpoints as its blocks have tokens for, and rows that are in
    use."""

    interval: int
    """Tokens between checkpoints; 0: the model has no recurrent layers."""
    row_bytes: int
    working_rows: int
    guess_rows: int = 0
    """Beside those of the pool (`ModelInfo.guess_states`)."""

    @classmethod
    def of(cls, config: CacheSettings, interval: int, row_bytes: int, free: int) -> StateSpace:
        """Each seat has a checkpoint and a row in use, each step under way a row for each interval of its tokens; or as
        many as a share of the memory holds, and then requests wait for rows as they wait for blocks. That memory is
        kv_cache_memory, or the `free` bytes. Guesses get what is left of the share, within bounds."""
        if not interval:
            return cls(0, 0, 0)
        if config.num_blocks is None and config.kv_cache_memory is not None:
            free = parse_memory(config.kv_cache_memory, free=free)
        least = _ROWS_OF_SEAT + _STEPS * (-(-config.max_num_batched_tokens // interval) + 2)
        rows = least + _ROWS_OF_SEAT * (config.max_num_seqs - 1)
        share = int(free * _SHARE_OF_STATES) // row_bytes
        working = min(rows, max(least, share))
        return cls(interval, row_bytes, working, min(_MOST_GUESS_ROWS, max(_LEAST_GUESS_ROWS, share - working)))

    @property
    def working_bytes(self) -> int:
        return (self.working_rows + self.guess_rows) * self.row_bytes

    def bytes_beside(self, block_size: int) -> int:
        """Of checkpoints, for each block."""
        return -(-self.row_bytes * block_size // self.interval) if self.interval else 0

    def group(self, num_blocks: int, block_size: int) -> StateGroup | None:
        """For a cache of so many blocks."""
        if not self.interval:
            return None
        return StateGroup(self.interval, self.working_rows + num_blocks * block_size // self.interval, block_size)


_ROWS_OF_SEAT = 2
_STEPS = 2
"""Under way."""
_SHARE_OF_STATES = 0.25
"""Of the memory, for rows in use."""
_LEAST_GUESS_ROWS, _MOST_GUESS_ROWS = 4, 16
"""More of them would be for batches so large that guesses are not worth their time. Linux gives them no memory before
they are used."""


class LayerGroup(NamedTuple):
    """Layers with the same window, which share a block table (`ModelInfo.kv_groups`)."""

    window: int
    layers: tuple[int, ...]
    """They live in the slots of the cache, from the first on: memory that all groups share, since a block belongs to
    one group at a time."""
    per_slot: int = 1
    """Layers in one slot: several, where layers of other groups have that much larger keys and values."""

    @property
    def num_slots(self) -> int:
        return -(-len(self.layers) // self.per_slot)

    def in_slot(self, slot: int) -> tuple[int, ...]:
        """The layers that live there."""
        return self.layers[slot * self.per_slot : (slot + 1) * self.per_slot]

    def place(self, layer: int) -> int:
        """Which one of its slot's layers it is."""
        return self.layers.index(layer) % self.per_slot


def group_layers(windows: Sequence[int], sizes: Sequence[int] = ()) -> list[LayerGroup]:
    """Deals the layers out to groups of about equal size, so that a block is as large in all of them; `windows` as in
    `KVGroup.window`, for each layer. One kind of layer is one group. (The rule of vLLM's hybrid KV cache manager.)
    `sizes`: of a token's keys in each layer; (): all the same."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, kind in enumerate(zip(windows, sizes or [1] * len(windows), strict=True)):
        kinds.setdefault(kind, []).append(layer)
    largest = max(size for _, size in kinds)
    per_slot = {kind: largest // kind[1] if largest % kind[1] == 0 else 1 for kind in kinds}
    counts = [-(-len(layers) // per_slot[kind]) for kind, layers in kinds.items()]
    # Where the kinds have about as many layers, a few empty slots cost less than more groups.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for (kind, layers), slots in zip(kinds.items(), counts, strict=True):
        parts = -(-slots // size)
        groups += [LayerGroup(kind[0], tuple(layers[part::parts]), per_slot[kind]) for part in range(parts)]
    return groups


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{name}={value!r} is not one of {', '.join(allowed)}", param=name)


def check_positive(settings: object, *names: str, optional: bool = False) -> None:
    """That they are integers from 1 on; with `optional` also None."""
    for name in names:
        value = getattr(settings, name)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(f"{name}={value!r} is not a positive integer", param=name)
