"""Triton's rate limiter: which instances of all models may execute now. No clock, no thread.

An instance executes while it holds what it needs of the resources. Those that wait for a resource get it in the order
of their executions, with the one that is next, times their priority: with priority 2 an instance has half the turns of
one with priority 1, and has its first after two of the other's. It is fair queueing, for each resource: `start` is
that product without the next execution, but an instance that begins to wait starts no lower than the last one that got
the resource. So one that is new, or was idle, does not keep the others waiting until it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.classic.instances import Instance, grouped_instances
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError

GLOBAL = -1
"""In the place of a device: the resource is there once, for all devices."""
ANY_DEVICE = -2
"""Of an amount: so much on each device."""

Resource = tuple[int, str]
"""The device, or GLOBAL, and the name."""


@dataclass(slots=True, eq=False)
class Seat:
    """An instance of a model, as the limiter sees it."""

    needs: Mapping[Resource, int]
    priority: int = 1
    """At least 1."""
    wake: Callable[[], None] = lambda: None
    """Told when it holds what it has waited for."""
    holds: bool = False
    waits: bool = False
    start: dict[Resource, int] = field(default_factory=dict)
    """Its place among those that wait for the resource; lower is earlier."""
    finish: dict[Resource, int] = field(default_factory=dict)
    """The lowest next start."""


class RateLimiter:
    def __init__(self, amounts: Mapping[Resource, int] | None = None) -> None:
        """`amounts` of resources, by device or ANY_DEVICE; that of a resource without an entry is 0. With no amounts at
        all there is as much of each resource as the instance that needs most of it."""
        self._amounts = dict(amounts or {})
        self._seats: dict[Seat, None] = {}
        self._limits: dict[Resource, int] = {}
        self.held: dict[Resource, int] = {}
        """What the instances hold together."""
        self._reached: dict[Resource, int] = {}
        """The start of the last one that got it, of resources that an instance needs."""
        self._waiting: list[Seat] = []
        """Those that have waited longest first."""
        self._stale = False
        """Something has changed since `settle`: one that waits may be served now."""

    def enter(self, seats: Iterable[Seat]) -> None:
        """The instances of a model. Raises InvalidRequestError, in Triton's words, when they could never execute."""
        entering = dict.fromkeys(seats)
        self._set_limits(self._seats | entering)
        self._seats |= entering
        self._stale = True
        self.settle()

    def leave(self, seats: Iterable[Seat]) -> None:
        """The model is gone; what its instances hold is free."""
        for seat in seats:
            if seat in self._seats:
                self.decline(seat)
                del self._seats[seat]
        self._set_limits(self._seats)
        self._reached = {resource: self._reached.get(resource, 0) for resource in self._limits}
        self.settle()

    def acquire(self, seat: Seat) -> bool:
        """Whether it may execute now. If not, it waits, and `wake` is called when it may."""
        if not seat.needs or seat.holds:
            return True
        if not seat.waits:
            for resource in seat.needs:
                seat.start[resource] = max(seat.finish.get(resource, 0), self._reached.get(resource, 0))
            if not self._waiting and self._fits(seat):
                self._take(seat)
                return True
            seat.waits = self._stale = True
            self._waiting.append(seat)
        self.settle(seat)
        return seat.holds

    def release(self, seat: Seat) -> None:
        """It has executed. Call `settle` when it has had the chance to ask again: its turn may be the next one, too."""
        if seat.holds:
            seat.finish = {resource: start + seat.priority for resource, start in seat.start.items()}
            self._free(seat)

    def decline(self, seat: Seat) -> None:
        """It has nothing to execute: waits no longer, and gives back what it holds. Call `settle` afterwards."""
        if seat.holds:
            self._free(seat)
        elif seat.waits:
            seat.waits = False
            self._waiting.remove(seat)
            self._stale = True

    def settle(self, asking: Seat | None = None) -> None:
        """Serves those whose turn it is, and wakes them, but for the one that is asking."""
        if not self._stale:
            return
        self._stale = False
        blocked: set[Resource] = set()
        served = []
        for seat in sorted(self._waiting, key=lambda seat: (self._distance(seat), seat.priority)):
            # Whatever one needs is kept for it: else those that need little would overtake it forever.
            if blocked.isdisjoint(seat.needs) and self._fits(seat):
                self._take(seat)
                served.append(seat)
            else:
                blocked.update(seat.needs)
        if served:
            self._waiting = [seat for seat in self._waiting if seat.waits]
        for seat in served:
            if seat is not asking:
                seat.wake()

    def _distance(self, seat: Seat) -> int:
        """How far off the end of its turn is, at the resource where it is nearest: where no other instance asks for a
        resource, nothing would bring its turn nearer."""
        return seat.priority + min(seat.start[resource] - self._reached.get(resource, 0) for resource in seat.needs)

    def _fits(self, seat: Seat) -> bool:
        for resource, count in seat.needs.items():
            if self.held.get(resource, 0) + count > self._limits[resource]:
                return False
        return True

    def _take(self, seat: Seat) -> None:
        seat.waits, seat.holds = False, True
        for resource, count in seat.needs.items():
            self.held[resource] = self.held.get(resource, 0) + count
            self._reached[resource] = max(self._reached.get(resource, 0), seat.start[resource])

    def _free(self, seat: Seat) -> None:
        seat.holds = False
        self._stale = True
        for resource, count in seat.needs.items():
            self.held[resource] -= count
            if not self.held[resource]:
                del self.held[resource]

    def _set_limits(self, seats: Iterable[Seat]) -> None:
        """How much there is of each resource that one of these needs. Raises InvalidRequestError."""
        limits: dict[Resource, int] = {}
        for seat in seats:
            for resource, count in seat.needs.items():
                limits[resource] = max(count, limits.get(resource, 0))
        for device, name in limits:
            if device != GLOBAL and (GLOBAL, name) in limits:
                raise InvalidRequestError(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        self._limits = self._amounts_for(limits) if self._amounts else limits

    def _amounts_for(self, needed: Mapping[Resource, int]) -> dict[Resource, int]:
        limits = {}
        for (device, name), least in needed.items():
            devices = {one for one, _ in self._amounts} if device == GLOBAL else {device, ANY_DEVICE}
            amount = max((self._amounts.get((one, name), 0) for one in devices), default=0)
            if amount < least:
                raise InvalidRequestError(
                    f'Resource count for "{name}" is limited to {amount} which will prevent scheduling of one or more '
                    f"model instances, the minimum required count is {least}"
                )
            limits[device, name] = amount
        return limits


def has_rate_limits(config: ModelConfig) -> bool:
    """Whether an instance of it needs resources of the rate limiter."""
    return any(group.rate_limiter.resources for group in config.instance_group)


class ModelLimits:
    def __init__(self, config: ModelConfig, limiter: RateLimiter) -> None:
        """Raises InvalidRequestError for more than there is of a resource, ValueError for groups that cannot be."""
        self._limiter = limiter
        self._executing: set[int] = set()
        self._asking: set[int] = set()
        """Those that wait, or hold what they have waited for and do not execute yet."""
        self._seats = []
        for group, context in grouped_instances(config):
            settings = group.rate_limiter
            needs = {
                (GLOBAL if getattr(resource, "global") else context.device_id, resource.name): resource.count
                for resource in settings.resources
                if resource.count
            }
            self._seats.append(Seat(needs, max(1, settings.priority)))
        limiter.enter(self._seats)

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is called when instances that waited may execute."""
        for seat in self._seats:
            seat.wake = wake

    def acquire(self, number: int) -> bool:
        """Whether the instance may execute a batch now; if not, it waits."""
        self._asking.add(number)
        return self._limiter.acquire(self._seats[number])

    def started(self, number: int) -> None:
        """The instance executes a batch."""
        self._asking.discard(number)
        self._executing.add(number)

    def ended(self, instances: Sequence[Instance]) -> None:
        """Those that execute no longer give back what they hold. Call `wait` or `settle` afterwards."""
        for number in [number for number in self._executing if instances[number].idle]:
            self._executing.remove(number)
            self._limiter.release(self._seats[number])

    def wait(self, numbers: Collection[int]) -> None:
        """Only these have a batch and wait; what others have got without need, they give back."""
        for number in self._asking.difference(numbers):
            self._asking.remove(number)
            self._limiter.decline(self._seats[number])
        self.settle()

    def settle(self) -> None:
        """Others may have what these have given back."""
        self._limiter.settle()

    def close(self) -> None:
        """The model is gone."""
        self._limiter.leave(self._seats)
