"""A gateway in front of replicas: the dispatcher that serves, with its routing, its failover and its resuming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.errors import InvalidRequestError, PenstockError, from_code
from penstock.engines.replicas.dispatcher import Dispatcher
from penstock.engines.replicas.membership import Membership
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.state import MoveCounts, ReplicaSettings
from penstock.planning.clock import EventQueue
from penstock.planning.engine import PlannedEngine, QuickHasher
from penstock.planning.flight import Flight

_RETRY = 0.25
"""Seconds between two looks at requests that wait for a replica, as `ReplicatedEngine` takes them."""
REFUSED, BROKEN, INVALID = "http_503", "stream_error", "http_400"
"""What load tests call a request that no replica takes, one whose stream ends with an error, and one that is too
long."""


class PlannedGateway:
    def __init__(self, engines: Sequence[PlannedEngine], settings: ReplicaSettings, events: EventQueue) -> None:
        """`engines`: all that there may ever be; those that are not `ready` get nothing."""
        self.engines = engines
        self._events = events
        members = Membership()
        for number, engine in enumerate(engines):
            members.join(number, engine.info, "planned")
        # of an Engine the dispatcher uses the part that is here
        replicas = [Replica(number, cast(Engine, engine)) for number, engine in enumerate(engines)]
        self._dispatcher = Dispatcher(
            replicas,
            members,
            settings,
            clock=lambda: events.now,
            is_member=lambda replica: replica.number in members,
            waits=self._waits,
            hasher=QuickHasher(),
        )
        self._dispatcher.open()
        for engine in engines:
            engine.on_error = self.look_at
        self._waiting = False
        self._unsure: dict[Flight, None] = {}
        """Requests that a replica has refused, or died with: the dispatcher may have ended them."""

    @property
    def moves(self) -> MoveCounts:
        return self._dispatcher.moves

    def send(self, flight: Flight) -> None:
        prompt = flight.prompt
        if prompt is None:
            raise ValueError("a request that has ended")
        prompt.flight = flight
        params = SamplingParams(max_tokens=flight.output_tokens, temperature=0.0, ignore_eos=True)
        message = AddRequest(self._dispatcher.new_ids(1), prompt, params, self._events.now)
        try:
            flight.stream = self._dispatcher.submit([message])
        except PenstockError:
            flight.end(self._events.now, REFUSED)

    def died(self, engine: PlannedEngine) -> None:
        """Its requests go on elsewhere, or end."""
        flights = engine.flights
        engine.die()
        self.look_at(flights)

    def look_at(self, flights: Sequence[Flight]) -> None:
        """These may have ended with an error."""
        for flight in flights:
            stream = flight.stream
            if stream is not None and not stream.live_ids:
                flight.end(self._events.now, _kind(stream, BROKEN if flight.num_tokens else REFUSED))
            elif stream is not None and self._dispatcher.waiting:
                self._unsure[flight] = None

    def _waits(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._events.after(_RETRY, self._retry)

    def _retry(self) -> None:
        self._waiting = False
        self._dispatcher.retry()
        flights, self._unsure = list(self._unsure), {}
        self.look_at(flights)
        if self._dispatcher.waiting:
            self._waits()


def _kind(stream: RequestStream, otherwise: str) -> str:
    """Of the error that a stream has ended with."""
    errors = [output.error.code for output in stream.take() if output.error is not None]
    return INVALID if errors and isinstance(from_code(errors[-1], ""), InvalidRequestError) else otherwise
