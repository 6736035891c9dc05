"""A public name at work: which target a request goes to, and how it ended there. No clocks: times are passed in."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from hashlib import blake2b

from penstock.gateway.configuration.traffic_rules import Target, TrafficRule
from penstock.gateway.metrics.request_metrics import Histogram
from penstock.gateway.models.traffic.shift import Shift
from penstock.gateway.requests.record import Outcome

MAX_PINS = 1 << 16


class SequencePins:
    """The one used longest ago first. Times are passed in."""

    def __init__(self, most: int = MAX_PINS) -> None:
        self._most = most
        self._pins: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()
        self._on: Counter[str] = Counter()
        """Sequences by target."""

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, sequence: Hashable, now: float) -> str | None:
        target, until = self._pins.get(sequence, (None, now))
        return target if until > now else None

    def targets(self) -> set[str]:
        return set(self._on)

    def keep(self, sequence: Hashable, target: str, now: float, idle_seconds: float) -> None:
        """Until `drop`, or until nothing has come for so long. Beyond the bound the ones used longest ago go: they are
        chosen again by their id, which leads to the same target unless weights have changed."""
        self.drop(sequence)
        self._pins[sequence] = target, now + idle_seconds
        self._on[target] += 1
        while self._pins:
            first = next(iter(self._pins))
            if len(self._pins) <= self._most and self._pins[first][1] > now:
                break
            self.drop(first)

    def drop(self, sequence: Hashable) -> None:
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            self._on[pin[0]] -= 1
            if not self._on[pin[0]]:
                del self._on[pin[0]]


# Which of several targets a key belongs to: rendezvous hashing with weights.
#
# Each target draws an exponential time at the rate of its weight, from a hash of the key and its own name; the
# earliest one has the key. So shares are as the weights say, nothing is kept, and a weight that grows takes keys from
# the others while no other key moves.

_RANGE = 2.0**64


def fraction(key: bytes, salt: str) -> float:
    """Above 0 and at most 1, the same for the same key and salt, and evenly spread over keys."""
    digest = blake2b(b"%b\0%b" % (salt.encode(), key), digest_size=8, usedforsecurity=False).digest()
    return (int.from_bytes(digest, "big") + 0.5) / _RANGE


def choose(key: bytes, weights: Iterable[tuple[str, float]]) -> str | None:
    """One of the names, each with its weight; None where no weight is above 0."""
    best, chosen = math.inf, None
    for name, weight in weights:
        if weight > 0:
            time = -math.log(fraction(key, name)) / weight
            if chosen is None or (time, name) < (best, chosen):  # two can be infinite
                best, chosen = time, name
    return chosen


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class TargetCounts:
    def __init__(self) -> None:
        self.accepted = 0
        self.ended: Counter[Outcome] = Counter()
        text = "From a target's accepting a request to its answer, or the first response of a stream."
        self.seconds = Histogram("penstock_traffic_request_seconds", text, _SECONDS)

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ended.total()


class TrafficRoute:
    def __init__(self, rule: TrafficRule, tell: Callable[[int, str], None]) -> None:
        """`tell`: as `Shift` has it."""
        self.rule = rule
        self.shift = None if rule.shift is None else Shift(rule.shift, tell)
        self.targets: dict[str, Target] = {target.id: target for target in rule.targets}
        """By id: the rule's first, then those of earlier rules where sequences began. See `reachable`."""
        self.counts = {target: TargetCounts() for target in self.targets}
        self.pins = SequencePins()

    def take_over(self, old: TrafficRoute) -> None:
        """This rule replaces that one: counts go on, and sequences stay where they are."""
        old.stop_shift()
        self.pins = old.pins
        pinned = self.pins.targets()
        for target, counts in old.counts.items():
            if target in pinned:
                self.targets.setdefault(target, old.targets[target])
            if target in self.targets or counts.in_flight:
                self.counts[target] = counts

    def reachable(self) -> dict[str, Target]:
        """The rule's targets, and those of earlier rules while sequences are on them."""
        if len(self.targets) > len(self.rule.targets):
            kept = self.pins.targets().union(target.id for target in self.rule.targets)
            for gone in self.targets.keys() - kept:
                del self.targets[gone]
        return self.targets

    def stop_shift(self) -> None:
        """This rule holds no longer: requests that are under way neither move its shift nor end it."""
        self.shift = None

    def shares(self) -> dict[str, float]:
        """The part of the requests that each target gets while all are available; together 1."""
        weights = {target.id: target.weight for target in self.rule.targets}
        if self.shift is None:
            total = sum(weights.values())
            return {target: weight / total for target, weight in weights.items()}
        new, part = self.shift.rule.to, self.shift.percent / 100
        rest = sum(weight for target, weight in weights.items() if target != new)
        return {
            target: part if target == new else (1 - part) * weight / rest if part < 1 else 0.0
            for target, weight in weights.items()
        }

    def advance(self, available: Collection[str], now: float) -> None:
        if self.shift is not None:
            new = self.shift.rule.to
            old_targets = [target.id for target in self.rule.targets if target.id != new and target.weight]
            self.shift.advance(
                now, new_available=new in available, old_available=all(other in available for other in old_targets)
            )

    def choose(
        self, key: bytes, available: Collection[str], now: float, only: Collection[str] | None = None
    ) -> str | None:
        """The target for a request, which may name those that it wants `only`. The share of one that is not available
        goes to the others; None where no available one has a share."""
        self.advance(available, now)
        candidates = available if only is None else only
        return choose(key, ((target, share) for target, share in self.shares().items() if target in candidates))

    def choose_for_sequence(
        self,
        sequence: Hashable,
        key: bytes,
        available: Collection[str],
        now: float,
        only: Collection[str] | None = None,
        *,
        start: bool,
        end: bool,
        idle_seconds: float,
    ) -> str | None:
        """The target that the sequence began on, even if that is not available; else as `choose`. After so long without
        a request nobody knows the sequence any more."""
        pinned = None if start else self.pins.get(sequence, now)
        target = pinned or self.choose(key, available, now, only)
        if end:
            self.pins.drop(sequence)
        elif target is not None:
            self.pins.keep(sequence, target, now, idle_seconds)
        return target

    def accepted(self, target: str) -> None:
        self.counts[target].accepted += 1

    def ended(self, target: str, outcome: Outcome, seconds: float | None, now: float) -> None:
        """Once for each that was accepted. `seconds`: until its answer, or the first response of a stream."""
        counts = self.counts[target]
        counts.ended[outcome] += 1
        if seconds is not None and outcome is Outcome.OK:
            counts.seconds.observe(seconds)
        if self.shift is not None:
            self.shift.ended(target, outcome, seconds, now)
