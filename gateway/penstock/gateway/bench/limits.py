"""What the machine does at most: the measure of an engine's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engines.contract.model_info import ModelWork
from penstock.gateway.bench.figures import Spread


class Limits(Protocol):
    def read_speed(self, num_bytes: float, threads: int) -> Spread:
        """Bytes per second of so many threads that read so many bytes over and over."""
        ...

    def product_speed(self, threads: int) -> Spread:
        """FLOPs per second of large products in the types of the model's."""
        ...


@dataclass(frozen=True)
class _Measured:
    work: ModelWork
    repeats: int

    def read_speed(self, num_bytes: float, threads: int) -> Spread:
        from penstock.engines.host.read_speed import read_speeds

        return Spread.of(read_speeds(int(num_bytes), threads, self.repeats))

    def product_speed(self, threads: int) -> Spread:
        from penstock.engines.openvino.work import product_speeds

        return Spread.of(product_speeds(self.work, threads, self.repeats))


def limits_of(work: ModelWork | None, repeats: int) -> Limits | None:
    """Of this machine; None: what is counted, if anything, is not what the CPU does."""
    return None if work is None or not work.threads else _Measured(work, repeats)
