"""How often a client may ping, by the rules that gRPC's servers have for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.gateway.http2.errors import ConnectionFault, ErrorCode

_IDLE_SECONDS = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRules:
    min_seconds: float = 300.0
    """Between two pings, while nothing is sent to the client."""
    max_strikes: int = 2
    """Pings that come too early before the connection ends; 0: any number."""
    allowed_when_idle: bool = False
    """Without a stream, the least time between two pings is two hours if this is not set."""


class PingJudge:
    def __init__(self, rules: PingRules) -> None:
        self._rules = rules
        self._strikes = 0
        self._last = -math.inf

    def sent(self) -> None:
        """Headers or data have been sent since: a client may ask whether they could be sent faster."""
        self._strikes = 0
        self._last = -math.inf

    def received(self, now: float, *, idle: bool) -> None:
        """Raises ConnectionFault. `idle`: the connection has no stream."""
        rules = self._rules
        least = _IDLE_SECONDS if idle and not rules.allowed_when_idle else rules.min_seconds
        early = now < self._last + least
        self._last = now
        if early:
            self._strikes += 1
            if self._strikes > rules.max_strikes > 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
