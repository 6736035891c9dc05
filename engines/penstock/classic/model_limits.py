"""What the rate limiter allows a model: its instances by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from penstock.classic.groups import grouped_instances
from penstock.classic.instances import Instance
from penstock.classic.model_config import ModelConfig
from penstock.classic.rate_limiter import GLOBAL, RateLimiter, Seat


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
