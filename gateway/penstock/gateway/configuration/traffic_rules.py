"""Rules for public names that several models serve: as they stand in files and in bodies of requests."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_MAX_TARGETS = 16
_MAX_STEPS = 64
_TENANT, _HEADER = "tenant", "header:"


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, an adapter of one, or one version of a model."""

    model: _Name
    version: Annotated[int, Meta(ge=1)] | None = None
    """None: the version that the model's own name stands for."""

    @property
    def id(self) -> str:
        """`model` or `model/version`, as metrics, headers and `shift.to` have it."""
        return self.model if self.version is None else f"{self.model}/{self.version}"


class WeightedTarget(Target, frozen=True, forbid_unknown_fields=True):
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """Its share is this, over the sum of all weights. 0: it gets no requests."""


class ShadowRule(Target, frozen=True, forbid_unknown_fields=True):
    """Requests that are also sent to a model whose answer nobody gets."""

    percent: Annotated[float, Meta(gt=0, le=100)] = 100.0
    """Of the requests."""
    absolute_tolerance: Annotated[float, Meta(ge=0)] = 0.0
    relative_tolerance: Annotated[float, Meta(ge=0)] = 0.0
    """Numbers a and b count as equal when |a - b| <= absolute + relative * |a|, where a is what was answered."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 8
    """More are dropped, and counted as that."""
    timeout_s: Annotated[float, Meta(gt=0, le=3600, extra={"unit": "s"})] = 30.0


class ShiftStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    percent: Annotated[float, Meta(gt=0, le=100)]
    seconds: Annotated[float, Meta(ge=0, extra={"unit": "s"})]


class ShiftRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a target takes over from the others."""

    to: _Name
    """The target's id."""
    steps: tuple[ShiftStep, ...]
    """In rising order; the last one is 100 percent."""
    min_requests: Annotated[int, Meta(ge=1)] = 100
    """That `to` has answered in a step before it is judged, and before the next step begins."""
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Of what `to` has answered in a step."""
    max_latency_ms: Annotated[float, Meta(gt=0, extra={"unit": "ms"})] | None = None
    """The 95th percentile of `to` in a step."""
    max_latency_ratio: Annotated[float, Meta(gt=0)] | None = None
    """That percentile over the one of the other targets."""


class TrafficRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public name and what serves it. Raises ValueError for parts that do not fit together; msgspec makes a
    ValidationError of that."""

    name: _Name
    targets: tuple[WeightedTarget, ...]
    sticky: str | None = None
    """`header:NAME` or `tenant`: requests with the same value go to the same target. Without it, or the value, the
    request's id decides."""
    shadow: ShadowRule | None = None
    shift: ShiftRule | None = None

    def __post_init__(self) -> None:
        ids = [target.id for target in self.targets]
        if not 1 <= len(ids) <= _MAX_TARGETS:
            raise ValueError(f"traffic {self.name!r}: it needs 1 to {_MAX_TARGETS} targets")
        if len(set(ids)) < len(ids):
            raise ValueError(f"traffic {self.name!r}: a target is named twice")
        if self.sticky is not None and self.sticky != _TENANT and self.sticky_header is None:
            raise ValueError(f"traffic {self.name!r}: sticky is 'tenant' or 'header:NAME', not {self.sticky!r}")
        if self.shadow is not None and self.shadow.id in ids:
            raise ValueError(f"traffic {self.name!r}: the shadow {self.shadow.id!r} is one of its targets")
        if self.shift is None:
            if not any(target.weight for target in self.targets):
                raise ValueError(f"traffic {self.name!r}: all weights are 0")
        else:
            self._check_shift(self.shift, ids)

    def _check_shift(self, shift: ShiftRule, ids: list[str]) -> None:
        percents = [step.percent for step in shift.steps]
        if shift.to not in ids:
            raise ValueError(f"traffic {self.name!r}: shift.to {shift.to!r} is not one of its targets")
        if not any(target.weight for target in self.targets if target.id != shift.to):
            raise ValueError(f"traffic {self.name!r}: a shift needs a target to begin with, with a weight above 0")
        if not 1 <= len(percents) <= _MAX_STEPS or percents[-1] != 100 or sorted(set(percents)) != percents:
            raise ValueError(f"traffic {self.name!r}: shift.steps must rise, and end at 100 percent")

    @property
    def by_tenant(self) -> bool:
        return self.sticky == _TENANT

    @property
    def sticky_header(self) -> bytes | None:
        """In lower case; None where no header decides."""
        if self.sticky is None or not self.sticky.startswith(_HEADER):
            return None
        name = self.sticky.removeprefix(_HEADER).strip().lower()
        return name.encode("latin-1") if name.isascii() and name else None
