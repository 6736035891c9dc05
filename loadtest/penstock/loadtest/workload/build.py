"""From settings to sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Session
from penstock.loadtest.options import Options
from penstock.loadtest.workload.arrivals import arrivals
from penstock.loadtest.workload.checks import check
from penstock.loadtest.workload.contents import Contents
from penstock.loadtest.workload.datasets import Dataset
from penstock.loadtest.workload.mixes import Share, shares
from penstock.loadtest.workload.sources import Source
from penstock.loadtest.workload.synthetic import Part, Synthetic
from penstock.loadtest.workload.traces import Trace

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
