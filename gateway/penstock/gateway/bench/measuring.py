"""Measures prompts and decode steps of a runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.bench.costs import decode_bytes, decode_flops, prompt_flops, threads_for
from penstock.gateway.bench.engine_report import DecodeRow, ProductSpeed, PromptRow
from penstock.gateway.bench.figures import Spread
from penstock.gateway.bench.limits import Limits
from penstock.gateway.bench.options import EngineBench
from penstock.gateway.bench.steps import StepDriver, blocks_for

_WARM_UP_STEPS = 3
"""Of each batch, before the first one that counts."""
_SHORTEST = 1e-9
"""Seconds; an engine without a model may take none."""


@dataclass(slots=True)
class Rows:
    prompts: list[PromptRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    products: list[ProductSpeed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What the context or the KV cache has no room for, with the reason."""


def measure(
    runner: ModelRunner,
    chunk: int,
    wanted: EngineBench,
    limits: Limits | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rows:
    """`limits`: None where there are none to compare with. Raises InvalidRequestError if nothing fits, and what the
    runner says of a request that failed."""
    bench = _Bench(runner, chunk, wanted, limits, clock)
    rows = bench.rows
    for length in wanted.prompt_lengths:
        if bench.fits(f"prompt {length}", 1, length + 1):
            rows.prompts.append(bench.prompt_row(length))
    for context in wanted.context_lengths:
        for batch in wanted.batch_sizes:
            if bench.fits(f"batch {batch}, context {context}", batch, context + bench.room):
                rows.decode.append(bench.decode_row(batch, context))
    if not rows.prompts and not rows.decode:
        raise InvalidRequestError(f"nothing can be measured: {'; '.join(rows.left_out)}")
    return rows


class _Bench:
    def __init__(
        self, runner: ModelRunner, chunk: int, wanted: EngineBench, limits: Limits | None, clock: Callable[[], float]
    ) -> None:
        self.rows = Rows()
        self.room = 1 + _WARM_UP_STEPS + wanted.repeats * wanted.decode_steps
        """Tokens that a request gets behind its context."""
        self._info = runner.info
        self._wanted = wanted
        self._limits = limits
        self._driver = StepDriver(runner, chunk, clock)
        self._random = np.random.default_rng(0)

    def fits(self, what: str, batch: int, length: int) -> bool:
        info, needed = self._info, batch * blocks_for(self._info, length)
        if length > info.max_model_len:
            reason = f"{length} tokens with what is generated are more than the model's {info.max_model_len}"
        elif needed > info.num_blocks:
            reason = f"it needs {needed} blocks of the KV cache, which has {info.num_blocks}"
        else:
            return True
        self.rows.left_out.append(f"{what}: {reason}")
        return False

    def prompt_row(self, length: int) -> PromptRow:
        seconds = []
        for _ in range(1 + self._wanted.repeats):  # the first one is the warm-up
            seconds.append(max(self._begin(length, 1), _SHORTEST))
            self._driver.drop_all()
        del seconds[0]
        speed = Spread.of([length / each for each in seconds])
        work = self._info.work
        flops = None if work is None else prompt_flops(work, self._info.kv_groups, length)
        return PromptRow(tokens=length, seconds=Spread.of(seconds), tokens_per_second=speed, flops=flops)

    def decode_row(self, batch: int, context: int) -> DecodeRow:
        for _ in range(batch):
            self._begin(context, self.room)
        steps = self._wanted.decode_steps
        ends = self._driver.decode(_WARM_UP_STEPS + self._wanted.repeats * steps)[_WARM_UP_STEPS - 1 :: steps]
        self._driver.drop_all()
        seconds = [max((end - begin) / steps, _SHORTEST) for begin, end in pairwise(ends)]
        row = DecodeRow(
            batch_size=batch,
            context_length=context,
            step_ms=Spread.of([1e3 * each for each in seconds]),
            tokens_per_second=Spread.of([batch / each for each in seconds]),
        )
        return row if self._info.work is None else self._with_reads(row, self._info.work)

    def _with_reads(self, row: DecodeRow, work: ModelWork) -> DecodeRow:
        batch, seconds = row.batch_size, row.step_ms.median / 1e3
        attended = row.context_length + 1 + _WARM_UP_STEPS + (self._wanted.repeats * self._wanted.decode_steps - 1) / 2
        num_bytes = decode_bytes(work, self._info.kv_groups, batch, attended)
        limit = self._limits and self._limits.read_speed(num_bytes, threads_for(work, batch))
        return msgspec.structs.replace(
            row,
            bytes=num_bytes,
            flops=decode_flops(work, self._info.kv_groups, batch, attended),
            read_speed=limit,
            share_of_read_speed=num_bytes / seconds / limit.most if limit else None,
        )

    def _begin(self, length: int, room: int) -> float:
        return self._driver.begin(self._random.integers(0, self._info.vocab_size, length).tolist(), room)


def compare_products(rows: Rows, work: ModelWork, chunk: int, limits: Limits) -> None:
    """Adds the shares of FLOPs. Afterwards this process has more memory than the runner alone."""
    speeds: dict[int, Spread] = {}

    def share(flops: float | None, seconds: float, num_tokens: int) -> float:
        threads = threads_for(work, num_tokens)
        if threads not in speeds:
            speeds[threads] = limits.product_speed(threads)
        return (flops or 0.0) / seconds / speeds[threads].most

    rows.prompts = [
        msgspec.structs.replace(row, share_of_flops=share(row.flops, row.seconds.median, min(row.tokens, chunk)))
        for row in rows.prompts
    ]
    rows.decode = [
        msgspec.structs.replace(row, share_of_flops=share(row.flops, row.step_ms.median / 1e3, row.batch_size))
        for row in rows.decode
    ]
    rows.products = [ProductSpeed(threads, speed) for threads, speed in sorted(speeds.items())]
