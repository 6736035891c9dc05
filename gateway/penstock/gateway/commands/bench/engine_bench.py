"""`penstock bench engine`: prompts, decode steps, memory and loading, beside what the machine can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.model_info import ModelInfo, ModelWork
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step import NewRequest, SchedulerOutput
from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.memory import ResidentMemory, resident_memory
from penstock.gateway.commands.bench.engine_report import (
    DecodeRow,
    EngineReport,
    MemoryFigures,
    Pages,
    ProductSpeed,
    PromptRow,
    table,
)
from penstock.gateway.commands.bench.figures import Spread, this_machine
from penstock.gateway.commands.bench.loading import find, load
from penstock.gateway.commands.bench.options import EngineBench
from penstock.gateway.configuration.config import Config, overlay
from penstock.kvcache import KVGroup

# Drives a runner step by step, with requests that have all the blocks that they will need from the beginning.
#
# There is no scheduler: what a step holds is what is to be measured. As many steps are under way as in a server.


@dataclass(slots=True)
class _Request:
    id: int
    block_ids: list[list[int]]
    """For each of `ModelInfo.tables`."""
    num_computed: int = 0


def blocks_for(info: ModelInfo, num_tokens: int) -> int:
    """That one request has here: also those behind a window, which a server takes back."""
    return sum(-(-num_tokens // group.block_size) for group in info.kv_groups)


class StepDriver:
    """Its requests live until `drop_all`."""

    def __init__(self, runner: ModelRunner, chunk: int, clock: Callable[[], float]) -> None:
        """`chunk`: most tokens of a step."""
        self._runner = runner
        self._chunk = chunk
        self._clock = clock
        info = runner.info
        self._blank = [list(range(info.num_blocks - 1, -1, -1))] * len(info.kv_groups)
        """For each of `ModelInfo.tables`; groups of layers share theirs."""
        if info.states is not None:
            self._blank.append(list(range(info.states.num_rows - 1, -1, -1)))
        self._live: list[_Request] = []
        self._dropped: list[int] = []
        """Of which the next step tells the runner."""
        self._next_id = 0

    def begin(self, prompt: Sequence[int], room: int) -> float:
        """Computes a prompt alone and samples the first of at most `room` tokens. Returns the seconds."""
        info, length = self._runner.info, len(prompt) + room
        blocks = [
            [blank.pop() for _ in range(-(-length // group.block_size))]
            for blank, group in zip(self._blank, info.kv_groups, strict=False)
        ]
        if info.states is not None:
            rows = [self._blank[-1].pop() for _ in range(-(-length // info.states.interval))]
            blocks.append([row for row in rows for _ in range(info.states.interval // info.states.block_size)])
        request = _Request(self._next_id, blocks)
        self._next_id += 1
        self._live.append(request)
        started = self._clock()
        return self._run(self._prompt_steps(request, prompt, room))[-1] - started

    def decode(self, num_steps: int) -> list[float]:
        """Each request gets one more token in each step. Returns when the steps ended."""
        return self._run(self._decode_step() for _ in range(num_steps))

    def drop_all(self) -> None:
        for request in self._live:
            self._dropped.append(request.id)
            for blank, ids in zip(self._blank, request.block_ids, strict=True):
                blank += reversed(dict.fromkeys(ids))
        self._live = []

    def _prompt_steps(self, request: _Request, prompt: Sequence[int], room: int) -> Iterator[SchedulerOutput]:
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        while request.num_computed < len(prompt):
            count = min(self._chunk, len(prompt) - request.num_computed)
            step = self._step([request], count)
            if request.num_computed == 0:
                tables = tuple(list(ids) for ids in request.block_ids)
                step.new_requests = [NewRequest(request.id, list(prompt), len(prompt), tables, params, seed=0)]
            request.num_computed += count
            yield step

    def _decode_step(self) -> SchedulerOutput:
        step = self._step(self._live, 1)
        for request in self._live:
            request.num_computed += 1
        return step

    def _step(self, requests: Sequence[_Request], count: int) -> SchedulerOutput:
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(
            request_ids=[request.id for request in requests],
            num_scheduled_tokens=[count] * len(requests),
            num_computed_tokens=[request.num_computed for request in requests],
            dropped_ids=dropped,
            total_num_scheduled_tokens=count * len(requests),
        )

    def _run(self, steps: Iterable[SchedulerOutput]) -> list[float]:
        """Raises what the runner says of a request that failed."""
        ends: list[float] = []
        under_way = 0
        for step in steps:
            self._runner.submit(step)
            under_way += 1
            if under_way == self._runner.max_steps_in_flight:
                ends.append(self._collect())
                under_way -= 1
        return ends + [self._collect() for _ in range(under_way)]

    def _collect(self) -> float:
        output = self._runner.collect()
        for error in output.failed.values():
            raise error
        return self._clock()


class EngineLimits(Protocol):
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


def limits_of(work: ModelWork | None, repeats: int) -> EngineLimits | None:
    """Of this machine; None: what is counted, if anything, is not what the CPU does."""
    return None if work is None or not work.threads else _Measured(work, repeats)


def decode_bytes(work: ModelWork, groups: Sequence[KVGroup], batch: int, context: float) -> float:
    """Read by a step in which each of `batch` requests gets a token: the weights once, and what each of these tokens
    attends to, of `context` tokens with itself."""
    keys_and_values = sum(size * _attended(group, context) for size, group in zip(work.kv_bytes, groups, strict=True))
    return work.weight_bytes + batch * keys_and_values


def decode_flops(work: ModelWork, groups: Sequence[KVGroup], batch: int, context: float) -> float:
    """Of the same step."""
    attention = sum(
        flops * _attended(group, context) for flops, group in zip(work.attention_flops, groups, strict=True)
    )
    return batch * (work.token_flops + work.logits_flops + attention)


def prompt_flops(work: ModelWork, groups: Sequence[KVGroup], length: int) -> float:
    """Of a whole prompt, and the logits of its last token. A token attends to those before it and to itself."""
    attention = sum(
        flops * sum(_attended(group, position + 1) for position in range(length))
        for flops, group in zip(work.attention_flops, groups, strict=True)
    )
    return length * work.token_flops + work.logits_flops + attention


def threads_for(work: ModelWork, num_tokens: int) -> int:
    """Of a step of so many tokens."""
    return next(threads for least, threads in reversed(work.threads) if num_tokens >= least)


def _attended(group: KVGroup, context: float) -> float:
    return min(context, group.window) if group.window else context


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
    options: EngineBench,
    limits: EngineLimits | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rows:
    """`limits`: None where there are none to compare with. Raises InvalidRequestError if nothing fits, and what the
    runner says of a request that failed."""
    bench = _Bench(runner, chunk, options, limits, clock)
    rows = bench.rows
    for length in options.prompt_lengths:
        if bench.fits(f"prompt {length}", 1, length + 1):
            rows.prompts.append(bench.prompt_row(length))
    for context in options.context_lengths:
        for batch in options.batch_sizes:
            if bench.fits(f"batch {batch}, context {context}", batch, context + bench.room):
                rows.decode.append(bench.decode_row(batch, context))
    if not rows.prompts and not rows.decode:
        raise InvalidRequestError(f"nothing can be measured: {'; '.join(rows.left_out)}")
    return rows


class _Bench:
    def __init__(
        self,
        runner: ModelRunner,
        chunk: int,
        options: EngineBench,
        limits: EngineLimits | None,
        clock: Callable[[], float],
    ) -> None:
        self.rows = Rows()
        self.room = 1 + _WARM_UP_STEPS + options.repeats * options.decode_steps
        """Tokens that a request gets behind its context."""
        self._info = runner.info
        self._options = options
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
        for _ in range(1 + self._options.repeats):  # the first one is the warm-up
            seconds.append(max(self._begin(length, 1), _SHORTEST))
            self._driver.drop_all()
        del seconds[0]
        speed = Spread.of([length / duration for duration in seconds])
        work = self._info.work
        flops = None if work is None else prompt_flops(work, self._info.kv_groups, length)
        return PromptRow(tokens=length, seconds=Spread.of(seconds), tokens_per_second=speed, flops=flops)

    def decode_row(self, batch: int, context: int) -> DecodeRow:
        for _ in range(batch):
            self._begin(context, self.room)
        steps = self._options.decode_steps
        ends = self._driver.decode(_WARM_UP_STEPS + self._options.repeats * steps)[_WARM_UP_STEPS - 1 :: steps]
        self._driver.drop_all()
        seconds = [max((end - begin) / steps, _SHORTEST) for begin, end in pairwise(ends)]
        row = DecodeRow(
            batch_size=batch,
            context_length=context,
            step_ms=Spread.of([1e3 * duration for duration in seconds]),
            tokens_per_second=Spread.of([batch / duration for duration in seconds]),
        )
        return row if self._info.work is None else self._with_reads(row, self._info.work)

    def _with_reads(self, row: DecodeRow, work: ModelWork) -> DecodeRow:
        batch, seconds = row.batch_size, row.step_ms.median / 1e3
        attended = (
            row.context_length + 1 + _WARM_UP_STEPS + (self._options.repeats * self._options.decode_steps - 1) / 2
        )
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


def compare_products(rows: Rows, work: ModelWork, chunk: int, limits: EngineLimits) -> None:
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


__all__ = ["run", "table"]


def run(config: Config, options: EngineBench) -> EngineReport:
    """Raises ConfigError, PenstockError."""
    machine = this_machine()
    target = find(overlay(config, {"max_num_seqs": max(config.models.scheduling.max_num_seqs, *options.batch_sizes)}))
    before = resident_memory()
    runner, times = load(target)
    try:
        loaded, chunk = resident_memory(), target.spec.scheduler.max_num_batched_tokens
        work = runner.info.work
        limits = limits_of(work, options.repeats)
        rows = measure(runner, chunk, options, limits)
        measured = resident_memory()
        if work is not None and limits is not None:
            compare_products(rows, work, chunk, limits)
        return EngineReport(
            machine=machine,
            model=target.name,
            runner=runner.info.runner,
            chunk=chunk,
            decode_steps=options.decode_steps,
            repeats=options.repeats,
            load=times,
            memory=MemoryFigures(_pages(before), _pages(loaded), _pages(measured), loaded.peak),
            work=work,
            products=rows.products,
            prompts=rows.prompts,
            decode=rows.decode,
            left_out=rows.left_out,
        )
    finally:
        runner.close()


def _pages(memory: ResidentMemory) -> Pages:
    return Pages(memory.anonymous, memory.file)
