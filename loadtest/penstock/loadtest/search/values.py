"""The values that a sweep goes through, and the settings of its runs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import LoadOptions, Options, SearchOptions, Target, WorkloadOptions

SWEPT = {
    "concurrency": LoadOptions,
    "rate": LoadOptions,
    "batch_size": Target,
    "prompt_tokens": WorkloadOptions,
    "output_tokens": WorkloadOptions,
}
"""What a sweep can change, and where it stands."""
DEFAULT_SECONDS = 30.0
"""Length of a run in a row of runs, where nothing else is said."""
_MOST_VALUES = 1000


class Sweep(NamedTuple):
    name: str
    """Of the setting."""
    values: list[float]


def parse_sweep(text: str) -> Sweep:
    """`rate=1,2,5`, `concurrency=1:64:x2` (1, 2, 4 ... 64), `concurrency=4:12:+4` (4, 8, 12), or several of these with
    commas between. Raises LoadTestError."""
    name, equals, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in SWEPT:
        raise LoadTestError(f"sweep: {text!r} is not NAME=VALUES, as concurrency=1,4,16 (names: {', '.join(SWEPT)})")
    values = list(dict.fromkeys(value for part in listed.split(",") for value in _values(part.strip())))
    if len(values) > _MOST_VALUES:
        raise LoadTestError(f"sweep: {len(values)} values, at most {_MOST_VALUES} are run")
    for value in values:
        if value <= 0 or (name != "rate" and value != int(value)):
            kind = "a number above 0" if name == "rate" else "a whole number from 1 on"
            raise LoadTestError(f"sweep: {value:g} cannot be: {name} is {kind}")
    return Sweep(name, values)


def _values(part: str) -> list[float]:
    bounds = part.split(":")
    if len(bounds) == 1:
        return [_number(part)]
    if len(bounds) != 3 or bounds[2][:1] not in ("x", "+"):
        raise LoadTestError(f"sweep: {part!r} is neither a value nor FROM:TO:STEP, with a step as x2 or +4")
    first, last, step = _number(bounds[0]), _number(bounds[1]), _number(bounds[2][1:])
    times = bounds[2].startswith("x")
    if first <= 0 or last < first or step <= (1 if times else 0):
        raise LoadTestError(f"sweep: {part!r} never gets from {first:g} to {last:g}")
    count = math.log(last / first) / math.log(step) if times else (last - first) / step
    if count > _MOST_VALUES:
        raise LoadTestError(f"sweep: {part!r} has more than {_MOST_VALUES} values")
    steps = range(math.floor(count + 1e-9) + 1)
    return [round(first * step**index if times else first + step * index, 9) for index in steps]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise LoadTestError(f"sweep: {text!r} is not a number")
    return value


def check_load(options: Options, name: str, what: str) -> None:
    """Raises LoadTestError when a setting cannot be varied, since another one has taken its place."""
    if options.workload.trace is not None and name != "batch_size":
        raise LoadTestError(f"{what}: a trace brings its own times and lengths; {name} would change nothing")
    if name == "concurrency" and options.load.rate is not None:
        raise LoadTestError(f"{what}: with --rate requests are sent at given times; concurrency would change nothing")
    if name.endswith("_tokens") and (options.workload.dataset is not None or options.workload.mix):
        raise LoadTestError(f"{what}: {name} is of synthetic prompts; a dataset or a mix brings its own")


def one_of_a_row(options: Options) -> Options:
    """The settings that all runs of a row share: nothing of the row itself, and an end."""
    load = options.load
    if options.workload.requests is None and load.duration is None and options.workload.dataset is None:
        load = replace(load, duration=DEFAULT_SECONDS)
    return replace(options, load=load, search=SearchOptions())


def at(options: Options, name: str, value: float) -> Options:
    """With this value of a swept setting."""
    chosen: Any = value if name == "rate" else round(value)
    section = SWEPT[name]
    for field in ("target", "workload", "load"):
        settings = getattr(options, field)
        if isinstance(settings, section):
            options = replace(options, **{field: replace(settings, **{name: chosen})})
    return options
