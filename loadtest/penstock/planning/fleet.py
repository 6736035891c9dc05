"""The replicas of a fleet: which there are, where they are, and what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.replicas.state import ReplicaSettings, RoutingPolicy
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.kvcache import KVGroup
from penstock.loadtest.errors import LoadTestError
from penstock.planning.clock import EventQueue
from penstock.planning.engine import PlannedEngine, StepModel
from penstock.planning.flight import Flight, Gaps
from penstock.planning.gateway import PlannedGateway
from penstock.planning.options import EngineOptions, FleetOptions
from penstock.planning.prompts import VOCABULARY

_FORM = re.compile(r"(replica|zone)=(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


class Failure(msgspec.Struct, frozen=True):
    """`replica=3@30`, `zone=1@60+120`"""

    kind: str
    """`replica` or `zone`."""
    number: int
    """Counted from 0."""
    at: float
    """Seconds after the beginning."""
    lasts: float | None
    """Seconds until its replicas can start again. None: a replica starts at once, a zone stays away."""

    def __str__(self) -> str:
        return f"{self.kind}={self.number}@{self.at:g}" + (f"+{self.lasts:g}" if self.lasts is not None else "")


def parse_failures(texts: Sequence[str], replicas: int, zones: int) -> list[Failure]:
    """`replicas`: that there can be. Raises LoadTestError."""
    failures = []
    for text in texts:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise LoadTestError(f"failure: {text!r} is not like replica=3@30 or zone=1@60+120")
        kind, number, at, lasts = match.groups()
        most = zones if kind == "zone" else replicas
        if int(number) >= most:
            raise LoadTestError(f"failure: {text!r}: there are {most} {kind}s, counted from 0")
        failures.append(Failure(kind, int(number), float(at), None if lasts is None else float(lasts)))
    return failures


_STEP_TOKENS = 512
"""Most tokens in one step, as a server without a GPU has it."""


class State(StrEnum):
    AWAY = "away"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class PlannedReplica:
    """A place for a replica, and the replica that is there now."""

    def __init__(self, number: int, zone: int, engine: PlannedEngine) -> None:
        self.number = number
        self.zone = zone
        self.engine = engine
        self.state = State.AWAY
        self.life = 0
        """Counts starts and ends: what was planned for an earlier life does not happen."""
        self.paid_seconds = 0.0
        self.since = 0.0
        """When it was last started."""
        self.lost = False
        """Its zone, or the replica by itself, cannot be started."""


class Fleet:
    def __init__(
        self,
        engine: EngineOptions,
        fleet: FleetOptions,
        model: StepModel,
        events: EventQueue,
        *,
        most: int,
    ) -> None:
        """`most`: replicas that there may be at a time. Raises LoadTestError."""
        self.gaps = Gaps()
        self._events = events
        self._start_seconds = fleet.start_seconds
        num_gateways = -(-most // fleet.replicas_per_gateway)
        simulated = min(fleet.simulated_gateways or num_gateways, num_gateways)
        self.scale = num_gateways / simulated
        """Of each simulated thing there are so many."""
        info, config = _info(engine), _scheduler(engine)
        numbers = [number for number in range(most) if number % num_gateways < simulated]
        self.replicas = {
            number: PlannedReplica(
                number, number // num_gateways % fleet.zones, PlannedEngine(info, config, model, events, self.gaps)
            )
            for number in numbers
        }
        settings = ReplicaSettings(
            policy=RoutingPolicy(fleet.replica_routing), resume=fleet.resume, resume_wait=fleet.resume_wait
        )
        self.gateways: list[PlannedGateway | None] = [None] * num_gateways
        self._gateway_of: dict[int, PlannedGateway] = {}
        for first in range(simulated):
            own = [number for number in numbers if number % num_gateways == first]
            gateway = PlannedGateway([self.replicas[number].engine for number in own], settings, events)
            self.gateways[first] = gateway
            self._gateway_of.update(dict.fromkeys(own, gateway))

    def in_state(self, *states: State) -> list[PlannedReplica]:
        return [replica for replica in self.replicas.values() if replica.state in states]

    # -- coming and going ------------------------------------------------------------------------------------

    def begin(self, count: int) -> None:
        """So many serve from the beginning."""
        for replica in list(self.replicas.values())[:count]:
            self._start(replica, 0.0)

    def _start(self, replica: PlannedReplica, seconds: float) -> None:
        replica.life += 1
        life, replica.since = replica.life, self._events.now
        replica.state = State.STARTING

        def serve() -> None:
            if replica.life == life:
                replica.state = State.READY
                replica.engine.start()

        if seconds:
            self._events.after(seconds, serve)
        else:
            serve()

    def _end(self, replica: PlannedReplica) -> None:
        replica.life += 1
        replica.state = State.AWAY
        replica.paid_seconds += self._events.now - replica.since

    def scale_to(self, number: int) -> None:
        """Starts or drains until so many serve or start. Those that drain serve on before new ones are started."""
        while (current := self.in_state(State.STARTING, State.READY)) and len(current) > number:
            starting = [replica for replica in current if replica.state is State.STARTING]
            self._drain((starting or current)[-1])
        for _ in range(number - len(current)):
            draining, away = self.in_state(State.DRAINING), self.in_state(State.AWAY)
            startable = [replica for replica in away if not replica.lost]
            if draining:
                self._undrain(draining[0])
            elif startable:
                self._start(min(startable, key=self._crowd), self._start_seconds)

    def _crowd(self, replica: PlannedReplica) -> tuple[int, int]:
        """Replicas of its zone: the emptiest gets the next one."""
        here = self.in_state(State.STARTING, State.READY, State.DRAINING)
        return sum(other.zone == replica.zone for other in here), replica.number

    def _drain(self, replica: PlannedReplica) -> None:
        """It gets no new requests, and goes when those that it has are complete."""
        if replica.state is State.STARTING:
            self._end(replica)
            return
        replica.state, engine = State.DRAINING, replica.engine
        engine.ready = False

        def gone() -> None:
            engine.on_idle = None
            engine.stop()
            self._end(replica)

        if engine.idle:
            gone()
        else:
            engine.on_idle = gone

    def _undrain(self, replica: PlannedReplica) -> None:
        replica.state, replica.engine.on_idle = State.READY, None
        replica.engine.ready = True

    # -- failures --------------------------------------------------------------------------------------------

    def lose(self, failure: Failure, *, restart: bool) -> dict[Flight, int]:
        """Those that it hits die at once. `restart`: they are started again when they can be; else something else
        says how many there are to be. Returns the requests that they had, with the tokens that each had got."""
        of_zone = failure.kind == "zone"
        hit = [one for one in self.replicas.values() if failure.number == (one.zone if of_zone else one.number)]
        there = [replica for replica in hit if replica.state is not State.AWAY]
        for replica in hit:
            replica.lost = True
            replica.engine.ready = False
        had: dict[Flight, int] = {}
        for replica in there:
            self._end(replica)
            had |= self._kill(replica)
        lasts = failure.lasts if of_zone else failure.lasts or 0.0
        if lasts is not None:
            self._events.after(lasts, lambda: self._come_back(hit, there if restart else ()))
        return had

    def _kill(self, replica: PlannedReplica) -> dict[Flight, int]:
        engine = replica.engine
        engine.on_idle = None
        if not engine.alive:
            return {}
        engine.catch_up()
        had = {flight: flight.num_tokens for flight in engine.flights}
        self._gateway_of[replica.number].died(engine)
        return had

    def _come_back(self, replicas: Sequence[PlannedReplica], started: Sequence[PlannedReplica]) -> None:
        for replica in replicas:
            replica.lost = False
        for replica in started:
            if replica.state is State.AWAY:
                self._start(replica, self._start_seconds)

    # -- what is seen of it ----------------------------------------------------------------------------------

    def catch_up(self) -> None:
        for replica in self.replicas.values():
            if replica.engine.alive:
                replica.engine.catch_up()

    def paid_seconds(self) -> float:
        """Of all replicas so far, those that are assumed to be alike included."""
        now = self._events.now
        return self.scale * sum(
            replica.paid_seconds + (now - replica.since if replica.state is not State.AWAY else 0.0)
            for replica in self.replicas.values()
        )


def _info(engine: EngineOptions) -> ModelInfo:
    return ModelInfo(
        vocab_size=VOCABULARY,
        max_model_len=engine.max_model_len,
        kv_groups=(KVGroup(engine.kv_block_size),),
        num_blocks=engine.num_kv_blocks,
        eos_token_ids=(),
        runner="planned",
        supports_resume=True,
    )


def _scheduler(engine: EngineOptions) -> SchedulerConfig:
    """Raises LoadTestError."""
    try:
        return SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens or max(_STEP_TOKENS, engine.max_num_seqs),
            itl_target_ms=engine.itl_target_ms,
            steps_in_flight=engine.steps_in_flight,
            max_queued_requests=engine.max_queued_requests,
            enable_prefix_caching=engine.prefix_caching,
        )
    except ValueError as error:
        raise LoadTestError(str(error)) from None
