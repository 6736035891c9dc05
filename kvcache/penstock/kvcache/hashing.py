"""Hashes of full blocks, chained: equal hashes mean equal tokens from the very first one on, and equal extra keys."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from penstock.kvcache.pool import BlockHash

DIGEST_SIZE = 16
"""Bytes of a hash."""


class BlockHasher:
    """Keyed BLAKE2b, with a secret key: a client cannot construct colliding prompts."""

    def __init__(self, key: bytes | None = None, adapters_of: bytes | None = None) -> None:
        """`key`: None for one of this process. With another process's key, hashes are the same there, except those
        with an adapter: the keys of adapters are counted in each process, so they may mean other weights there.
        `adapters_of`: equal where an adapter's key means the same weights; None: nowhere else."""
        self._key = secrets.token_bytes(32) if key is None else key
        self._adapters_of = secrets.token_bytes(16) if adapters_of is None else adapters_of

    def root(self, *, adapter: str = "", salt: str = "") -> BlockHash:
        """The parent of a prompt's first block. Requests share blocks only if their extra keys are equal.

        Each key is written with its length, so that no two different sets of keys look alike.
        """
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_SIZE, person=b"root")
        if adapter:
            hasher.update(self._adapters_of)
        for part in (adapter, salt):
            data = part.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(8, "little") + data)
        return hasher.digest()

    def block(self, parent: BlockHash, token_ids: Sequence[int], attached: bytes = b"") -> BlockHash:
        """Hash of one full block behind `parent`. `attached`: what its tokens do not say, such as images. It comes
        last, behind two parts whose lengths a block size decides, so that no two different blocks look alike."""
        data = parent + array("Q", token_ids).tobytes() + attached
        return hashlib.blake2b(data, key=self._key, digest_size=DIGEST_SIZE).digest()


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """What the prefix cache knows a group's block by: groups cache different layers of the same tokens."""
    return block_hash + bytes((group,)) if group else block_hash


def group_and_hash(key: BlockHash) -> tuple[int, BlockHash]:
    """What `group_key` made it of."""
    return (key[-1], key[:-1]) if len(key) > DIGEST_SIZE else (0, key)


class HashChain:
    """Hashes of the leading full blocks of one sequence of tokens, as far as they were needed so far."""

    __slots__ = ("_hasher", "adapter", "block_size", "hashes", "root")

    def __init__(
        self,
        hasher: BlockHasher,
        root: BlockHash,
        block_size: int,
        hashes: list[BlockHash] | None = None,
        adapter: str = "",
    ) -> None:
        """`adapter`: the one that `root` was made with."""
        self._hasher = hasher
        self.root = root
        self.adapter = adapter
        self.block_size = block_size
        self.hashes = [] if hashes is None else hashes

    def extend(self, token_ids: Sequence[int], count: int) -> None:
        """Makes the first `count` hashes known."""
        hashes, size = self.hashes, self.block_size
        for index in range(len(hashes), count):
            tokens = token_ids[index * size : (index + 1) * size]
            hashes.append(self._hasher.block(hashes[-1] if hashes else self.root, tokens))

    def branch(self, num_tokens: int) -> HashChain:
        """A chain of another sequence that has the same first `num_tokens`."""
        hashes = self.hashes[: num_tokens // self.block_size]
        return HashChain(self._hasher, self.root, self.block_size, hashes, self.adapter)

    def extra_keys(self, first: int, stop: int) -> list[list[str] | None] | None:
        """Of each block from `first` up to `stop`, what it holds beside tokens, for those who keep an index of hashes.
        None: nothing."""
        return None


class Attachment(NamedTuple):
    """Something that positions hold instead of what their tokens stand for: the embeddings of an image."""

    start: int
    """The first of these positions."""
    length: int
    key: bytes
    """Equal only where the contents are equal."""
    offset: int = 0
    """Of its own rows, the one at `start`."""


class AttachedChain(HashChain):
    """Of a sequence of tokens with attachments: each is part of the hash of every block that holds some of it."""

    __slots__ = ("_attachments", "_starts")

    def __init__(
        self,
        hasher: BlockHasher,
        root: BlockHash,
        block_size: int,
        attachments: Sequence[Attachment],
        hashes: list[BlockHash] | None = None,
        adapter: str = "",
    ) -> None:
        """`attachments`: by their positions, ascending, without overlaps."""
        super().__init__(hasher, root, block_size, hashes, adapter)
        self._attachments = attachments
        self._starts = [one.start for one in attachments]

    def extend(self, token_ids: Sequence[int], count: int) -> None:
        hashes, size = self.hashes, self.block_size
        for index in range(len(hashes), count):
            tokens = token_ids[index * size : (index + 1) * size]
            attached = b"".join(map(_written, self._parts(index)))
            hashes.append(self._hasher.block(hashes[-1] if hashes else self.root, tokens, attached))

    def branch(self, num_tokens: int) -> HashChain:
        hashes = self.hashes[: num_tokens // self.block_size]
        return AttachedChain(self._hasher, self.root, self.block_size, self._attachments, hashes, adapter=self.adapter)

    def extra_keys(self, first: int, stop: int) -> list[list[str] | None] | None:
        keys = [[part.key.hex() for part in self._parts(index)] or None for index in range(first, stop)]
        return keys if any(keys) else None

    def _parts(self, index: int) -> list[Attachment]:
        """Of the attachments, what block `index` holds; starts count from the block's own first position."""
        begin, end, parts = index * self.block_size, (index + 1) * self.block_size, []
        for number in range(max(0, bisect_right(self._starts, begin) - 1), bisect_right(self._starts, end - 1)):
            start, length, key, offset = self._attachments[number]
            first, stop = max(start, begin), min(start + length, end)
            if first < stop:
                parts.append(Attachment(first - begin, stop - first, key, offset + first - start))
        return parts


def _written(part: Attachment) -> bytes:
    return array("Q", (part.start, part.length, part.offset, len(part.key))).tobytes() + part.key


Chains = tuple[HashChain, ...]
"""One for each group of layers; groups with equal block sizes share theirs."""
