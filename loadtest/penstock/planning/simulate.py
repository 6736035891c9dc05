"""One run of one fleet."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.metrics import Figures
from penstock.planning.clients import Clients
from penstock.planning.clock import EventQueue
from penstock.planning.figures import summarize
from penstock.planning.fleet import Failure, Fleet, State, parse_failures
from penstock.planning.flight import Flight
from penstock.planning.options import PlanOptions, ScalingOptions
from penstock.planning.prompts import load_options, sessions
from penstock.planning.report import Calibration, FleetFigures

# How many replicas there should be: the rule of Kubernetes' HorizontalPodAutoscaler, with the behavior that
# deploy/kubernetes/components/hpa asks for. Plain data: times are passed in.

_TOLERANCE = 0.1
"""So near to the target nothing is changed."""
_DOUBLING = 60.0
"""In so many seconds the number may double."""


class Autoscaler:
    def __init__(self, settings: ScalingOptions) -> None:
        """Raises LoadTestError."""
        self.least, self.most = _range(settings.autoscale or "")
        self._settings = settings
        self._wanted: deque[tuple[float, int]] = deque()
        """What was recommended, and when, as far back as scale-in looks."""
        self._numbers: deque[tuple[float, int]] = deque()
        """How many there were, as far back as scale-out looks."""
        self._last_in = -math.inf

    def number(self, now: float, current: int, waiting: int, kv_use: float) -> int:
        """The number of replicas from now on. `current`: those that serve or start; `waiting`: requests that wait at
        all of them; `kv_use`: the sum of their shares of the KV cache that are in use."""
        settings = self._settings
        load = max(waiting / settings.scale_queue, kv_use / settings.scale_kv)
        near = current > 0 and abs(load / current - 1) <= _TOLERANCE
        replicas = current if near else min(self.most, max(self.least, math.ceil(load)))
        _keep(self._wanted, now, replicas, settings.scale_in_after)
        _keep(self._numbers, now, current, _DOUBLING)
        if replicas > current:
            return min(replicas, max(self.least, 2 * min(number for _, number in self._numbers)))
        enough = max(number for _, number in self._wanted)
        if enough < current and now - self._last_in >= settings.scale_in_pause:
            self._last_in = now
            return current - 1
        return max(current, self.least)


def _keep(rows: deque[tuple[float, int]], now: float, number: int, seconds: float) -> None:
    rows.append((now, number))
    while rows[0][0] < now - seconds:
        rows.popleft()


def _range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon or not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise LoadTestError(f"autoscale: {text!r} is not least and most replicas, such as 2:8")
    return int(least), int(most)


_LOOK = 1.0
"""Seconds between two looks at the replicas."""


class Look:
    """What the replicas were like at one moment."""

    __slots__ = ("at", "kv_use", "serving")

    def __init__(self, at: float, serving: int, kv_use: float) -> None:
        self.at = at
        self.serving = serving
        self.kv_use = kv_use


class Simulation:
    """`run` once, then look at the rest. Raises LoadTestError for settings that contradict each other."""

    def __init__(self, options: PlanOptions, calibration: Calibration) -> None:
        fleet, load = options.fleet, options.load
        self.options = options
        self.events = EventQueue()
        self.autoscaler = Autoscaler(options.scaling) if options.scaling.autoscale else None
        self._begin_with = fleet.replicas
        most = fleet.replicas
        if self.autoscaler is not None:
            self._begin_with = max(self.autoscaler.least, min(self.autoscaler.most, fleet.replicas))
            most = self.autoscaler.most
        _check(options)
        self.failures = parse_failures(fleet.failure, most, fleet.zones)
        self.fleet = Fleet(options.engine, fleet, calibration.step, self.events, most=most)
        self.clients = Clients(
            sessions(options.workload, load),
            load,
            self.fleet.gateways,
            self.events,
            gateway_seconds=calibration.gateway_ms / 1e3,
            template_tokens=calibration.template_tokens,
            tokenizer=options.workload.tokenizer,
        )
        self.hit: dict[Failure, dict[Flight, int]] = {}
        self.looks: list[Look] = []
        self.kv_use_max = 0.0
        self.cpu_seconds = 0.0

    @property
    def open_loop(self) -> bool:
        return load_options(self.options.workload, self.options.load).open_loop

    @property
    def flights(self) -> Sequence[Flight]:
        return self.clients.flights

    def run(self) -> None:
        """Raises LoadTestError where the workload does, and when it has no requests."""
        began = time.process_time()
        self.fleet.begin(self._begin_with)
        for failure in self.failures:
            self.events.at(failure.at, lambda failure=failure: self._fail(failure))  # type: ignore[misc]
        self._look()
        if self.autoscaler is not None:
            self.events.after(self.options.scaling.scale_interval, self._scale)
        self.clients.start()
        self.events.run(lambda: self.clients.done)
        self.cpu_seconds = time.process_time() - began
        if not self.flights:
            raise LoadTestError("the workload has no requests")

    def _fail(self, failure: Failure) -> None:
        restart = failure.kind == "replica" or self.autoscaler is None
        self.hit[failure] = self.fleet.lose(failure, restart=restart)

    def _look(self) -> None:
        self.fleet.catch_up()
        serving = self.fleet.in_state(State.READY, State.DRAINING)
        uses = [replica.engine.kv_use for replica in serving]
        self.kv_use_max = max([self.kv_use_max, *uses])
        self.looks.append(Look(self.events.now, len(serving), sum(uses)))
        self.events.after(_LOOK, self._look)

    def _scale(self) -> None:
        scaler = self.autoscaler
        if scaler is None:
            return
        self.fleet.catch_up()
        current = self.fleet.in_state(State.STARTING, State.READY)
        serving = [replica.engine for replica in current if replica.state is State.READY]
        waiting = sum(engine.stats.num_waiting for engine in serving)
        kv_use = sum(engine.kv_use for engine in serving)
        self.fleet.scale_to(scaler.number(self.events.now, len(current), waiting, kv_use))
        self.events.after(self.options.scaling.scale_interval, self._scale)

    # -- what came of it -------------------------------------------------------------------------------------

    def figures(self) -> Figures:
        return summarize(
            self.flights,
            self.fleet.gaps,
            open_loop=self.open_loop,
            objectives=parse_objectives(self.options.load.goodput),
            seconds=max(flight.ended or 0.0 for flight in self.flights),
            scale=self.fleet.scale,
        )

    def fleet_figures(self, figures: Figures) -> FleetFigures:
        fleet, price = self.fleet, self.options.fleet.price
        engines = [replica.engine for replica in fleet.replicas.values()]
        hits, queries, preemptions = (sum(column) for column in zip(*(e.totals for e in engines), strict=True))
        moves = [gateway.moves for gateway in fleet.gateways if gateway is not None]
        paid, scale = fleet.paid_seconds(), fleet.scale
        serving = sum(look.serving for look in self.looks)
        cost = price * paid / 3600 if price else None

        def per_million(tokens: int) -> float | None:
            return None if cost is None or not tokens else cost / tokens * 1e6

        return FleetFigures(
            replicas_mean=scale * serving / len(self.looks),
            replicas_most=round(scale * max(look.serving for look in self.looks)),
            replica_hours=paid / 3600,
            kv_use_mean=sum(look.kv_use for look in self.looks) / max(1, serving),
            kv_use_max=self.kv_use_max,
            busy=scale * sum(engine.busy_seconds for engine in engines) / paid if paid else 0.0,
            prefix_hits=hits / queries if queries else 0.0,
            preemptions=round(scale * preemptions),
            failed_over=round(scale * sum(move.failed_over for move in moves)),
            resumed=round(scale * sum(move.resumed for move in moves)),
            cost=cost,
            cost_per_million_output_tokens=per_million(figures.output_tokens),
            cost_per_million_tokens=per_million(figures.output_tokens + figures.prompt_tokens),
        )


def _check(options: PlanOptions) -> None:
    fleet, goals = options.fleet, options.goals
    if goals.find_replicas and not goals.slo:
        raise LoadTestError("find-replicas: which bounds are to be kept? (--slo ttft_p99:500)")
    if options.scaling.autoscale and goals.find_replicas:
        raise LoadTestError("find-replicas: autoscale finds the number by itself")
    if fleet.simulated_gateways:
        if options.scaling.autoscale:
            raise LoadTestError("simulated-gateways: autoscale looks at all replicas")
        if any(text.startswith("replica") for text in fleet.failure):
            raise LoadTestError("simulated-gateways: the failure of one replica is not that of all; zones can fail")
        if not load_options(options.workload, options.load).open_loop:
            raise LoadTestError("simulated-gateways: needs --rate or --trace; a closed loop waits for all")
