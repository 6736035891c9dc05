"""The view of a scheduler for operators (`EngineView`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import groupby, islice

from penstock.engines.contract.engine_view import (
    MOST_CELLS,
    MOST_REQUESTS,
    BlockMap,
    EngineView,
    RequestView,
    WaitsFor,
)
from penstock.engines.contract.step_ring import StepRow
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.request import Request, RequestStatus
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import BlockPool


def scheduler_view(scheduler: Scheduler, steps: Sequence[StepRow], now: float) -> EngineView:
    running = [run.request for run in scheduler.running.runs]
    followers = [sample for request in scheduler.intake.requests.values() for sample in request.followers]
    waiting = heapq.nsmallest(MOST_REQUESTS, scheduler.intake, key=lambda request: request.key)
    reasons = _Reasons(scheduler)
    shown = list(islice((*running, *waiting, *followers), MOST_REQUESTS))
    return EngineView(
        now=now,
        requests=[_request_view(request, reasons.of(request), now) for request in shown],
        more_requests=len(running) + scheduler.num_waiting - len(shown),
        steps=list(steps),
        target_seconds=scheduler.config.itl_target_ms / 1e3,
        seats=scheduler.config.max_num_seqs,
        step_tokens=scheduler.config.max_num_batched_tokens,
        blocks=block_map(scheduler.kv.pool),
    )


def queue_view(intake: QueueIntake, running: Iterable[Request], seats: int, now: float) -> EngineView:
    """Of an engine that schedules by itself: what runs is under its own scheduler."""
    live = list(running)
    waiting = heapq.nsmallest(MOST_REQUESTS, intake, key=lambda request: request.key)
    shown = (*live, *waiting)[:MOST_REQUESTS]
    return EngineView(
        now=now,
        requests=[_request_view(request, _queued_for(request), now) for request in shown],
        more_requests=len(live) + intake.num_waiting - len(shown),
        steps=[],
        target_seconds=0.0,
        seats=seats,
        step_tokens=intake.config.max_num_batched_tokens,
    )


def _queued_for(request: Request) -> WaitsFor:
    if request.status is RequestStatus.RUNNING:
        return WaitsFor.NOTHING
    return WaitsFor.TURN if request.pending is None else WaitsFor(request.pending.reason)


class _Reasons:
    """Why requests of a scheduler do not run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._intake = scheduler.intake
        self._head = scheduler.intake.waiting.peek()
        self._no_seat = scheduler.running.num_free_seats < 1
        self._no_blocks = scheduler.is_short_of_blocks
        self._others_run = scheduler.running.has_others

    def of(self, request: Request) -> WaitsFor:
        if request.status is RequestStatus.RUNNING:
            return WaitsFor.NOTHING
        if request.leader is not None:
            return WaitsFor.FIRST_SAMPLE
        pending = self._intake.passed_by(request) or request.pending
        if pending is not None:
            return WaitsFor(pending.reason)
        if request.background and self._others_run:
            return WaitsFor.FOREGROUND
        if self._no_seat:
            return WaitsFor.SEAT
        if request is not self._head:
            return WaitsFor.TURN
        return WaitsFor.BLOCKS if self._no_blocks else WaitsFor.NOTHING


def _request_view(request: Request, waits_for: WaitsFor, now: float) -> RequestView:
    run = request.run
    return RequestView(
        label=request.label,
        status=request.status.name.lower(),
        waits_for=waits_for,
        tenant=request.tenant,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_tokens - request.num_prompt_tokens,
        computed_tokens=0 if run is None else min(run.num_computed_tokens, request.num_tokens),
        cached_tokens=request.num_cached_tokens,
        blocks=0 if run is None else sum(len(table.held) for table in run.tables.tables),
        preemptions=request.num_preemptions,
        seconds=now - request.arrival_time,
        queued_seconds=(now if request.first_scheduled is None else request.first_scheduled) - request.arrival_time,
    )


def block_map(pool: BlockPool) -> BlockMap:
    """Counted in C, and drawn from as many blocks as there are cells: a step waits for this."""
    held = pool.num_blocks - pool.num_free
    shared = pool.num_shared
    cached = pool.num_evictable
    stride = -(-pool.num_blocks // MOST_CELLS)
    return BlockMap(
        blank=pool.num_free - cached,
        cached=cached,
        used=held - shared,
        shared=shared,
        stride=stride,
        cells=_runs(_cell(pool, block_id) for block_id in range(0, pool.num_blocks, stride)),
    )


def _runs(cells: Iterable[str]) -> str:
    return "".join([f"{sum(1 for _ in group)}{cell}" for cell, group in groupby(cells)])


def _cell(pool: BlockPool, block_id: int) -> str:
    count = pool.ref_count(block_id)
    if count:
        return "u" if count == 1 else "s"
    return "c" if pool.is_cached(block_id) else "."
