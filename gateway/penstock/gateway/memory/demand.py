"""What a model wants of each kind of memory, before anybody has said how much of it there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWish:
    """How large the KV cache shall be: `fixed` bytes, or a share of what is free beside the other needs."""

    fixed: int | None = None
    share: float = 0.0
    least: int = 0
    """Bytes below which the model is of no use."""
    most: int | None = None
    """Bytes that requests could fill."""

    def of_one(self, parts: int) -> CacheWish:
        """The wish of one of several engines that share what is free."""
        return replace(self, share=self.share / parts)

    def size(self, left: int) -> int:
        """Bytes, where so much is left beside the other needs."""
        if self.fixed is not None:
            return self.fixed
        size = int(max(left, 0) * self.share)
        return max(self.least, size if self.most is None else min(size, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Needs of one kind of memory, in bytes."""

    weights: int = 0
    cache: CacheWish = CacheWish(fixed=0)
    rest: int = 0
    """The process, activations, logits, adapters."""

    def of_one(self, parts: int) -> MemoryNeeds:
        return replace(self, cache=self.cache.of_one(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model wants of a machine."""

    host: MemoryNeeds
    device: MemoryNeeds = MemoryNeeds()
    """Of each of `gpus`."""
    gpus: Sequence[int] = ()
    """Places among those that CUDA shows."""
    gpu_share: float | None = None
    """Of each GPU's whole memory, which the engine takes and divides by itself."""
    workers: int = 1
    """Processes with a KV cache each, in the host's memory."""
    told: bool = False
    """The engine has to be told the size of the cache: by itself it would take a share of what it finds free, as would
    any other that is loaded at the same time."""
    hints: str = ""
    """Settings that make it smaller."""

    def of_one(self, parts: int) -> Demand:
        """Of one of several engines on the same devices: the shares of what is free are theirs together."""
        return replace(self, host=self.host.of_one(parts), device=self.device.of_one(parts))
