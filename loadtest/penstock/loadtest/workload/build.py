"""From settings to sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from random import Random
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Session
from penstock.loadtest.options import LoadOptions, Options, WorkloadOptions
from penstock.loadtest.workload.contents import CHATS, TENSORS, Contents
from penstock.loadtest.workload.datasets import Dataset
from penstock.loadtest.workload.mixes import SETTINGS, SYNTHETIC, Share, shares
from penstock.loadtest.workload.synthetic import Part, Synthetic
from penstock.loadtest.workload.traces import Trace
from penstock.loadtest.workload.vocabulary import Source

_DEFAULTS = WorkloadOptions()
_LOAD_DEFAULTS = LoadOptions()


def check(options: Options, parts: list[Share]) -> None:
    """Raises LoadTestError."""
    workload, load, protocol = options.workload, options.load, options.target.protocol
    if workload.trace is None:
        _none_of(workload, ("trace_speed", "trace_format", "trace_block"), "needs --trace")
    else:
        _none_of(workload, (*SETTINGS, "mix"), "a trace has its own requests")
        if load.rate is not None or load.ramp:
            raise LoadTestError("rate and ramp: a trace has its own times; --trace-speed changes them")
    if load.rate is None and load.arrival != _LOAD_DEFAULTS.arrival:
        raise LoadTestError("arrival: needs --rate; a closed loop sends when there is a free place")
    if options.open_loop:
        if load.concurrency != _LOAD_DEFAULTS.concurrency:
            raise LoadTestError(
                "concurrency: an open loop (--rate, --trace) sends at given times; --max-in-flight bounds it"
            )
    elif load.max_in_flight != _LOAD_DEFAULTS.max_in_flight:
        raise LoadTestError("max-in-flight: needs --rate or --trace; a closed loop has --concurrency")
    if load.burstiness != _LOAD_DEFAULTS.burstiness and load.arrival != "gamma":
        raise LoadTestError("burstiness: needs --arrival gamma")
    if protocol in TENSORS:
        for part in parts:
            _none_of(part.options, (*SETTINGS, "tokenizer"), f"{protocol} has tensors, not prompts")
    for part in parts:
        _check_part(part.options, protocol, workload.token_ids)


def _check_part(part: WorkloadOptions, protocol: str, token_ids: bool) -> None:
    if part.dataset is not None:
        _none_of(part, SYNTHETIC, "a dataset has its own prompts")
        if token_ids:
            raise LoadTestError("token-ids: a dataset has its own prompts")
    if part.prefixes > 1 and not part.shared_prefix_tokens:
        raise LoadTestError("prefixes: needs --shared-prefix-tokens")
    if part.turn_delay and part.turns == 1:
        raise LoadTestError("turn-delay: needs --turns of 2 or more")
    if part.turns > 1 and protocol not in CHATS:
        raise LoadTestError(f"turns: a session needs a protocol for chats, not {protocol}")


def _none_of(workload: WorkloadOptions, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(workload, name) != getattr(_DEFAULTS, name):
            raise LoadTestError(f"{name.replace('_', '-')}: {reason}")


def arrivals(load: LoadOptions, rng: Random) -> Iterator[float | None]:
    """Seconds after the start, without end and never falling; None in a closed loop.

    The times are those of the random process: they are not stretched so that a run of some length meets its mean rate,
    which would take the spread out of the number of arrivals. Constant times begin at 0, random ones after a gap.
    """
    if load.rate is None:
        yield from repeat(None)
        return
    passed = 0.0  # what the rate adds up to until the arrival: requests that should have come on average
    while True:
        if load.arrival == "constant":
            yield _when(passed, load.rate, load.ramp)
            passed += 1.0
        else:
            passed += rng.expovariate(1.0) if load.arrival == "poisson" else _gamma_gap(load.burstiness, rng)
            yield _when(passed, load.rate, load.ramp)


def _gamma_gap(shape: float, rng: Random) -> float:
    """Mean 1, variance 1/shape."""
    return rng.gammavariate(shape, 1.0 / shape)


def _when(passed: float, rate: float, ramp: float) -> float:
    """The time until which a rate that rises linearly for `ramp` seconds, then stays, adds up to `passed`."""
    in_ramp = rate * ramp / 2
    if passed < in_ramp:
        return math.sqrt(2 * ramp * passed / rate)
    return ramp + (passed - in_ramp) / rate


_DEFAULT_REQUESTS = 64


class Sessions(Iterator[Session]):
    """Made one by one as they are asked for. Raises LoadTestError where a trace has a row that cannot be."""

    def __init__(self, sessions: Iterator[Session], skipped: Callable[[], int]) -> None:
        self._sessions = sessions
        self._skipped = skipped

    def __next__(self) -> Session:
        return next(self._sessions)

    @property
    def skipped(self) -> int:
        """Records of the file that cannot be sent: of a dataset all, of a trace those up to here."""
        return self._skipped()


def build(
    options: Options, *, seed: int | None = None, part: int = 0, parts: int = 1, source: Source[Any] | None = None
) -> Sessions:
    """The run's sessions, or those that one of `parts` processes sends: the one at place p of the whole is of part
    p % parts, and nothing else depends on the parts.

    Equal settings and seeds (None: that of the settings) give equal sessions. They end with the requests asked for,
    or with the file; else with 64 requests, unless the run has a duration. `source`: what synthetic prompts are made
    of, in place of what the server's protocol and the tokenizer say. Raises LoadTestError for settings that contradict
    each other and for files that cannot be read.
    """
    workload = options.workload
    parts_of_mix = shares(workload)
    check(options, parts_of_mix)
    contents = Contents(options, workload.seed if seed is None else seed, source)
    if workload.trace is not None:
        trace = Trace(workload, contents)
        return Sessions(trace.sessions(part, parts), lambda: trace.skipped)
    sources = [_source(share, contents) for share in parts_of_mix]
    limit = _limit(options, sources)
    weights = [share.weight for share in parts_of_mix]
    sessions = _mixed(options, contents, sources, weights, limit, part, parts)
    return Sessions(sessions, lambda: sum(source.skipped for source in sources))


def _source(share: Share, contents: Contents) -> Part:
    kind = Synthetic if share.options.dataset is None else Dataset
    return kind(share.options, contents, share.name)


def asked_requests(options: Options) -> int | None:
    """That end the run; None: its duration does, or a file. Raises LoadTestError."""
    workload = options.workload
    if workload.requests is not None or options.load.duration is not None or workload.trace is not None:
        return workload.requests
    return _DEFAULT_REQUESTS if all(share.options.dataset is None for share in shares(workload)) else None


def _limit(options: Options, sources: list[Part]) -> int | None:
    """Most calls of the run; None: no limit."""
    requests, total = asked_requests(options), sources[0].total if len(sources) == 1 else None
    if requests is not None and total is not None and requests > total:
        raise LoadTestError(f"requests: the dataset has {total}, and prompts are not sent twice")
    return requests


def _mixed(
    options: Options,
    contents: Contents,
    sources: list[Part],
    weights: list[float],
    limit: int | None,
    part: int,
    parts: int,
) -> Iterator[Session]:
    """Ends with the first source that has no more, as the mix would be another without it."""
    draw, bounds = contents.rng("mix"), list(accumulate(weights))
    taken = [0] * len(sources)
    index = 0
    for number, at in enumerate(arrivals(options.load, contents.rng("arrivals"))):
        chosen = draw.choices(range(len(sources)), cum_weights=bounds)[0]
        source, nth = sources[chosen], taken[chosen]
        size = source.size(nth)
        if size is None:
            return
        if limit is not None:
            size = min(size, limit - index)
        if number % parts == part:
            yield Session(calls=source.calls(nth, number, index)[:size], at=at)
        taken[chosen] += 1
        index += size
        if index == limit:
            return
