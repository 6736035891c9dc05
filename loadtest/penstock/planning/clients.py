"""The load test's clients in virtual time: closed and open loops, sessions of several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.loadtest.messages import Session
from penstock.loadtest.options import LoadOptions
from penstock.planning.clock import EventQueue
from penstock.planning.flight import Flight, Prompt
from penstock.planning.gateway import PlannedGateway
from penstock.planning.prompts import answer, token_ids, with_template

_AGAIN = 0.1
"""A place of a closed loop whose request failed is taken again so long after it was sent."""


class Clients:
    """Sends what `sessions` has to the gateways in turn, a session to one gateway."""

    def __init__(
        self,
        sessions: Iterator[Session],
        load: LoadOptions,
        gateways: list[PlannedGateway | None],
        events: EventQueue,
        *,
        gateway_seconds: float,
        template_tokens: int,
        tokenizer: str | None,
    ) -> None:
        """`gateways`: None in place of those that are not simulated, whose sessions are left out."""
        self.flights: list[Flight] = []
        self._sessions = sessions
        self._load = load
        self._gateways = gateways
        self._events = events
        self._gateway_seconds = gateway_seconds
        self._template_tokens = template_tokens
        self._tokenizer = tokenizer
        self._turn = 0
        self._running = 0
        self._over = False

    @property
    def done(self) -> bool:
        return self._over and not self._running

    def start(self) -> None:
        """Raises LoadTestError where the workload does."""
        first = next(self._sessions, None)
        if first is None:
            self._over = True
        elif first.at is not None:
            self._expect(first)
        else:
            places = self._load.concurrency
            for place in range(places):
                session = first if place == 0 else None
                self._events.at(self._load.ramp * place / places, lambda s=session: self._take_place(s))  # type: ignore[misc]

    @property
    def _is_late(self) -> bool:
        return self._load.duration is not None and self._events.now > self._load.duration

    def _expect(self, session: Session) -> None:
        """Open loop: one arrival is looked forward to at a time."""
        due = session.at or 0.0
        if self._load.duration is not None and due > self._load.duration:
            self._over = True
            return

        def arrive() -> None:
            gateway = self._next_gateway()
            if gateway is not None:
                self._begin(session, gateway, lambda failed: None)
            following = next(self._sessions, None)
            if following is None:
                self._over = True
            else:
                self._expect(following)

        self._events.at(due, arrive)

    def _take_place(self, session: Session | None) -> None:
        """Closed loop: the next session, when the one before it has ended."""
        session = session or (None if self._is_late else next(self._sessions, None))
        gateway = self._next_gateway()
        if session is None or gateway is None:
            self._over = True
            return
        began = self._events.now

        def ended(failed: bool) -> None:
            self._events.at(began + _AGAIN if failed else self._events.now, lambda: self._take_place(None))

        self._begin(session, gateway, ended)

    def _next_gateway(self) -> PlannedGateway | None:
        self._turn += 1
        return self._gateways[(self._turn - 1) % len(self._gateways)]

    def _begin(self, session: Session, gateway: PlannedGateway, ended: Callable[[bool], None]) -> None:
        self._running += 1
        self._call(session, 0, [], gateway, ended)

    def _call(
        self,
        session: Session,
        number: int,
        history: list[int],
        gateway: PlannedGateway,
        ended: Callable[[bool], None],
    ) -> None:
        """Sends one call of a session behind what was said before, and when it is answered the next one."""
        call = session.calls[number]
        tokens = with_template(history + token_ids(call, self._tokenizer), self._template_tokens)
        flight = Flight(call.index, Prompt(tokens), call.output_tokens, due=self._events.now)
        self.flights.append(flight)

        def over(*, failed: bool) -> None:
            self._running -= 1
            ended(failed)

        def on_end(flight: Flight) -> None:
            if flight.error or number + 1 == len(session.calls) or self._is_late:
                over(failed=bool(flight.error))
                return
            longer = [*tokens, *answer(call.output_tokens)]

            def go_on() -> None:
                if self._is_late:  # the load test's end has come while the client read the answer
                    over(failed=False)
                else:
                    self._call(session, number + 1, longer, gateway, ended)

            self._events.after(session.calls[number + 1].delay, go_on)

        flight.on_end = on_end
        self._events.after(self._gateway_seconds, lambda: gateway.send(flight))
