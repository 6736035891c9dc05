"""Hashes of full blocks, chained: equal hashes mean equal tokens from the very first one on, and equal extra keys."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

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

    def block(self, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """Hash of one full block behind `parent`."""
        data = parent + array("Q", token_ids).tobytes()
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


Chains = tuple[HashChain, ...]
"""One for each group of layers; groups with equal block sizes share theirs."""
