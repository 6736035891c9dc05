"""A model version's counters: what Triton's statistics extension and its nv_inference_* metrics show.

Written on the event loop only. Times are nanoseconds.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

MAX_RESPONSE_STATISTICS = 1024
"""Numbers of responses that are counted apart: callers decide how many responses a request has, and what is counted
stays in memory and in every answer about statistics. The last one counts all beyond it, too."""


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ResponseStatistics:
    """The n-th responses of a decoupled model."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


class LatencyObserver(Protocol):
    """Receives the latencies of single requests that succeeded, and of first responses. All are nanoseconds."""

    def request(self, total: int, queue: int, compute_input: int, compute_infer: int, compute_output: int) -> None:
        """One that was executed."""
        ...

    def cache_hit(self, ns: int) -> None: ...

    def cache_miss(self, ns: int) -> None: ...

    def first_response(self, ns: int) -> None:
        """Of a decoupled model, from the request's arrival; it may be an error."""
        ...


@dataclass(slots=True)
class ModelStatistics:
    last_inference_ms: int = 0
    """Unix milliseconds."""
    inference_count: int = 0
    """Inferences: a request with a batch of n counts n."""
    execution_count: int = 0
    """Batches that were executed."""
    success: Duration = field(default_factory=Duration)
    """Whole requests, from arrival to the last response."""
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    """Responses that the response cache gave: looking them up. They count among `success` and `queue`, nowhere else."""
    cache_miss: Duration = field(default_factory=Duration)
    """Requests that the response cache did not know: looking them up, and keeping the response."""
    batches: dict[int, BatchStatistics] = field(default_factory=lambda: defaultdict(BatchStatistics))
    """By batch size."""
    responses: dict[int, ResponseStatistics] = field(default_factory=lambda: defaultdict(ResponseStatistics))
    """By the number of the response within its request, below MAX_RESPONSE_STATISTICS; decoupled models only."""
    failures: Counter[str] = field(default_factory=Counter)
    """By reason: REJECTED, CANCELED, BACKEND, OTHER."""
    pending: int = 0
    """Requests that wait for execution."""
    observer: LatencyObserver | None = None
    """None: only sums are kept."""

    def executed(self, batch_size: int, compute_input: int, compute_infer: int, compute_output: int) -> None:
        """One execution of a batch with `batch_size` inferences."""
        self.execution_count += 1
        batch = self.batches[batch_size]
        batch.compute_input.add(compute_input)
        batch.compute_infer.add(compute_infer)
        batch.compute_output.add(compute_output)

    def succeeded(
        self,
        *,
        requests: int,
        inferences: int,
        total: int,
        queue: int,
        compute_input: int,
        compute_infer: int,
        compute_output: int,
    ) -> None:
        """`requests` requests of one execution; `total` and `queue` are sums over them, the compute times of each."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.inference_count += inferences
        self.success.add(total, requests)
        self.queue.add(queue, requests)
        self.compute_input.add(compute_input * requests, requests)
        self.compute_infer.add(compute_infer * requests, requests)
        self.compute_output.add(compute_output * requests, requests)

    def answered_from_cache(self, ns: int) -> None:
        """A request whose response the response cache had."""
        self.success.add(ns)
        self.queue.add(0)
        self.cache_hit.add(ns)
        if self.observer is not None:
            self.observer.cache_hit(ns)

    def missed_by_cache(self, ns: int) -> None:
        """A request whose response the response cache did not have; it was executed."""
        self.cache_miss.add(ns)
        if self.observer is not None:
            self.observer.cache_miss(ns)

    def failed(self, ns: int, reason: str) -> None:
        self.fail.add(ns)
        self.failures[reason] += 1
