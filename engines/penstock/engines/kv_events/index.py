"""An index of what a server has cached, kept by its events. Plain data: no clock, no sockets.

It reads the forms in which vLLM has written events (vllm/distributed/kv_events.py): batches and events are arrays or
maps. Hashes are the server's own and only name its blocks. Prompts are matched by tokens: every block gets a hash of
this process over its tokens and those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.kvcache import BlockHash, BlockHasher, HashChain

MOST_BLOCKS = 1 << 17
"""Of one server, about 200 bytes each: two million tokens with blocks of 16."""
_MOST_HASH = 64
"""Bytes."""
_MOST_BLOCK_SIZE = 1 << 16
_MEMORY = (None, "GPU")
"""vLLM's word for the memory that the model computes from. Blocks in slower memory do not count."""
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layers that keep all blocks of a prompt."""

Name: TypeAlias = int | bytes
"""A block's hash at its server."""


class BadEvents(ValueError):
    """Bytes that are not a batch of events."""


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that follow each other."""

    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """Of each block, what its hash covers beside tokens: images, salts, the adapter's name."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[Name]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


Event: TypeAlias = Stored | Removed | Cleared


class _StoredRow(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedRow(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedRow(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


class _BatchRow(_Batch, array_like=True):
    pass


_event_of_map = msgspec.msgpack.Decoder(Event).decode
_event_of_array = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow).decode
_batch_of_map = msgspec.msgpack.Decoder(_Batch).decode
_batch_of_array = msgspec.msgpack.Decoder(_BatchRow).decode


class ReadBatch(NamedTuple):
    seconds: float
    """The server's time, in Unix seconds."""
    events: list[Event]


def read_batch(data: bytes) -> ReadBatch:
    """Raises BadEvents."""
    try:
        batch = _batch_of_array(data) if _is_array(data) else _batch_of_map(data)
        events = [_event_of_array(raw) if _is_array(raw) else _event_of_map(raw) for raw in batch.events]
    except msgspec.MsgspecError as error:
        raise BadEvents(str(error)) from None
    return ReadBatch(batch.ts, events)


def _is_array(data: bytes | msgspec.Raw) -> bool:
    """By the first byte (MessagePack specification, formats)."""
    first = bytes(memoryview(data)[:1])
    return b"\x90" <= first <= b"\x9f" or first in (b"\xdc", b"\xdd")


class PromptHashes:
    """Hashes of a prompt's blocks, in each size of block and for each adapter once, and only as far as they match."""

    def __init__(self, hasher: BlockHasher, token_ids: Sequence[int]) -> None:
        self._hasher = hasher
        self._token_ids = token_ids
        self._chains: dict[tuple[int, str], HashChain] = {}

    def num_leading(self, known: Container[BlockHash], block_size: int, adapter: str) -> int:
        """Blocks from the beginning that are known."""
        chain = self._chains.get((block_size, adapter))
        if chain is None:
            chain = HashChain(self._hasher, self._hasher.root(adapter=adapter), block_size)
            self._chains[block_size, adapter] = chain
        for count in range(len(self._token_ids) // block_size):
            chain.extend(self._token_ids, count + 1)
            if chain.hashes[count] not in known:
                return count
        return len(self._token_ids) // block_size


class CacheIndex:
    """Blocks of one model, or of one of its adapters, at one server.

    Where layers have several kinds, it follows one group: the first that keeps whole prompts, else the first. Blocks
    behind one that it does not know are left out, as are blocks whose tokens do not tell them apart (those with images
    or salts). A full index takes in nothing until the server has evicted something.
    """

    def __init__(self, hasher: BlockHasher, model: str, capacity: int = MOST_BLOCKS) -> None:
        """`hasher`: that of the prompts that are looked up. `model`: as the server calls it. Where its events have an
        adapter of this name, only that adapter's blocks match."""
        self._hasher = hasher
        self._model = model
        self._capacity = capacity
        self._group: int | None = None
        self._has_whole = False
        self._adapter = ""
        self._block_size = 0
        self._hashes: dict[Name, BlockHash] = {}
        self._counts: Counter[BlockHash] = Counter()
        """The server may have several blocks with the same tokens, of different salts."""

    def __len__(self) -> int:
        return len(self._hashes)

    def clear(self) -> None:
        self._hashes.clear()
        self._counts.clear()
        self._group, self._has_whole, self._block_size = None, False, 0

    def matched(self, prompt: PromptHashes) -> int:
        """Leading tokens of the prompt that are cached."""
        if not self._hashes:
            return 0
        return prompt.num_leading(self._counts, self._block_size, self._adapter) * self._block_size

    def apply(self, events: Sequence[Event]) -> None:
        """Raises BadEvents for what no server with a cache can say."""
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                if event.medium in _MEMORY and (event.group_idx or 0) == self._group:
                    for name in event.block_hashes:
                        self._remove(name)
            else:
                self.clear()

    def _store(self, event: Stored) -> None:
        size, names = event.block_size, event.block_hashes
        if not 0 < size <= _MOST_BLOCK_SIZE:
            raise BadEvents(f"a block of {size} tokens")
        if event.medium not in _MEMORY or not self._is_model(event) or not self._follows(event):
            return
        if not self._hashes:
            self._block_size = size
        if size != self._block_size or len(event.token_ids) != size * len(names):
            return
        parent = self._parent(event)
        for number, name in enumerate(names):
            if parent is None or not _is_told_by_tokens(event, number) or len(self._hashes) >= self._capacity:
                return
            try:
                parent = self._hasher.block(parent, event.token_ids[number * size : (number + 1) * size])
            except (OverflowError, TypeError):
                raise BadEvents("tokens that are no numbers of a vocabulary") from None
            self._add(name, parent)

    def _is_model(self, event: Stored) -> bool:
        if event.lora_name is None:
            return event.lora_id is None and not self._adapter
        if event.lora_name != self._model:
            return False
        if not self._adapter:
            self.clear()
            self._adapter = self._model
        return True

    def _follows(self, event: Stored) -> bool:
        """Whether it is of the group that counts."""
        group, is_whole = event.group_idx or 0, event.kv_cache_spec_kind in _WHOLE
        if self._group is None or (is_whole and not self._has_whole):
            self.clear()
            self._group, self._has_whole = group, is_whole
        return group == self._group

    def _parent(self, event: Stored) -> BlockHash | None:
        if event.parent_block_hash is None:
            return self._hasher.root(adapter=self._adapter)
        return self._hashes.get(event.parent_block_hash)

    def _add(self, name: Name, block_hash: BlockHash) -> None:
        if isinstance(name, bytes) and len(name) > _MOST_HASH:
            raise BadEvents(f"a hash of {len(name)} bytes")
        self._remove(name)
        self._hashes[name] = block_hash
        self._counts[block_hash] += 1

    def _remove(self, name: Name) -> None:
        block_hash = self._hashes.pop(name, None)
        if block_hash is not None:
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]


def _is_told_by_tokens(event: Stored, number: int) -> bool:
    """The block's hash covers nothing beside its tokens and its adapter."""
    if event.extra_keys is None:
        return True
    keys = event.extra_keys[number] if number < len(event.extra_keys) else None
    return keys is None or (isinstance(keys, list) and all(key == event.lora_name for key in keys))
