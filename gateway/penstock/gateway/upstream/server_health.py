"""Whether a server gets requests, by how the last ones ended. Plain data: times are passed in."""

from __future__ import annotations

_MOST_SECONDS = 60.0
_MISSED_PROBES = 2


class ServerHealth:
    """healthy ──failures in a row──► ejected ──time is over──► on trial ──an answer begins──► healthy
                                         ▲                          │
                                         └───────── a failure ──────┘

    On trial a server has one request at a time. Only an answer that ends well makes the next failure the first one
    again, so that a server whose streams always break is ejected, too. Apart from that, one that two probes in a row
    have not found gets no requests until a probe finds it.
    """

    def __init__(self, eject_after: int, eject_seconds: float) -> None:
        self._eject_after = eject_after
        self._base_seconds = eject_seconds
        self._failures = 0
        """Since an answer has ended well."""
        self._ejected_until: float | None = None
        self._seconds = eject_seconds
        """Of the next ejection."""
        self._rests_until = 0.0
        self._missed = 0
        """Probes in a row."""
        self.ejections = 0

    @property
    def healthy(self) -> bool:
        """Neither ejected nor on trial, and there."""
        return self._ejected_until is None and self._missed < _MISSED_PROBES

    def takes_requests(self, now: float, trials: int) -> bool:
        if self._missed >= _MISSED_PROBES or now < self._rests_until:
            return False
        return self._ejected_until is None or (now >= self._ejected_until and trials == 0)

    def seconds_until(self, now: float) -> float:
        """Until it may take requests again, as far as that is known."""
        return max(0.0, self._rests_until - now, (self._ejected_until or 0.0) - now)

    def began(self) -> None:
        """An answer has begun: the server is there, and its trial is over."""
        self._ejected_until = None
        self._missed = 0

    def answered(self) -> None:
        """To the end, or with an error that is the caller's."""
        self.began()
        self._failures = 0
        self._seconds = self._base_seconds

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._ejected_until is None:
            if self._failures >= self._eject_after:
                self._eject(now)
        elif now >= self._ejected_until:
            self._eject(now)

    def _eject(self, now: float) -> None:
        self._ejected_until = now + self._seconds
        self._seconds = min(self._seconds * 2, max(_MOST_SECONDS, self._base_seconds))
        self.ejections += 1

    def rests(self, until: float) -> None:
        """It has said that it takes nothing before."""
        self._rests_until = max(self._rests_until, until)

    def probed(self, *, there: bool) -> None:
        self._missed = 0 if there else self._missed + 1
        if self._missed == _MISSED_PROBES:
            self.ejections += 1
