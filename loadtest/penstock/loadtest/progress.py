"""The progress of a run: counts, rates and latencies, made of samples as they come."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.formatting import clean, duration, number
from penstock.loadtest.report.histogram import Tally

_RATE_SECONDS = 5.0
"""What rates are of: the last so many seconds."""


class Progress:
    """What a view shows, made of samples as they come."""

    def __init__(self, requests: int | None, seconds: float | None) -> None:
        self.requests = requests
        self.seconds = seconds
        self.elapsed = 0.0
        self.done = self.in_flight = 0
        self.errors: Counter[str] = Counter()
        self.ttft = Tally()
        self._recent: deque[tuple[float, int, int]] = deque()
        """When it was, and requests and tokens until then."""
        self._completed = self._tokens = 0

    def add(self, samples: Sequence[Sample], in_flight: int, elapsed: float) -> None:
        good = [sample for sample in samples if not sample.error]
        self.errors.update(sample.error for sample in samples if sample.error not in ("", INTERRUPTED))
        self.ttft.add(sample.arrivals[0] - sample.sent for sample in good if sample.arrivals)
        self.done += sum(sample.error != INTERRUPTED for sample in samples)
        self._completed += len(good)
        self._tokens += sum(sample.tokens for sample in good)
        self.in_flight, self.elapsed = in_flight, elapsed
        self._recent.append((elapsed, self._completed, self._tokens))
        while len(self._recent) > 2 and self._recent[1][0] < elapsed - _RATE_SECONDS:
            self._recent.popleft()

    @property
    def rates(self) -> tuple[float, float]:
        """Requests and output tokens per second, lately. Tokens count when their request is complete."""
        begun, requests, tokens = self._recent[0] if self._recent else (0.0, 0, 0)
        if self.elapsed <= _RATE_SECONDS:
            begun, requests, tokens = 0.0, 0, 0
        span = self.elapsed - begun
        return ((self._completed - requests) / span, (self._tokens - tokens) / span) if span > 0 else (0.0, 0.0)

    @property
    def share(self) -> float | None:
        """How much of the run is over; None when its end is not known."""
        shares = []
        if self.requests:
            shares.append(self.done / self.requests)
        if self.seconds:
            shares.append(self.elapsed / self.seconds)
        return min(1.0, max(shares)) if shares else None

    def parts(self) -> list[tuple[str, str]]:
        requests, tokens = self.rates
        of = f" of {self.requests:,}" if self.requests else ""
        failed = ", ".join(f"{clean(kind)} {count:,}" for kind, count in self.errors.most_common(4))
        return [
            ("elapsed", f"{self.elapsed:.1f} s" + (f" of {self.seconds:g} s" if self.seconds else "")),
            ("done", f"{self.done:,}{of}"),
            ("in flight", f"{self.in_flight:,}"),
            ("errors", failed or "none"),
            ("requests/s", number(requests)),
            ("output tokens/s", number(tokens)),
            ("TTFT", f"p50 {duration(self.ttft.quantile(0.5))}, p99 {duration(self.ttft.quantile(0.99))}"),
        ]
