"""The verdict on a run: whether it has measured the server, or the client and the machine that both share."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from penstock.loadtest.calibrate import Calibration
from penstock.loadtest.environment import machine_cores
from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.job import Done
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Distribution, Figures
from penstock.loadtest.options import Options
from penstock.loadtest.report.model import Validity

_BUSY, _SATURATED = 0.7, 0.9
"""Shares of a core from which a client process is short of time, and from which it is the bottleneck."""
_LAG_MS, _LAG_HOPELESS_MS = 10.0, 50.0
"""Lateness of the clients' event loops, 99th percentile."""
_LATE_MS, _LATE_SHARE, _LATE_HOPELESS = 10.0, 0.01, 0.1
"""Open loop: a request is late from so many milliseconds on; shares of late ones that matter, and that spoil a run."""
_FOREIGN_SHARE = 0.25
"""Of the machine's cores: from here on others disturb the run."""
_CLOCK_MS, _CLOCK_SHARE = 20.0, 0.001
"""More than that is not the steady correction by a time server, which is 0.05 % at most."""
_NEAR = 0.7
"""Of the ceiling: from here on the client is short of time."""
_CUT = 0.01
"""Of the requests: the figures look better than the server is when more than that had not ended by the end."""
_KNOWN = 0.3
"""Of the prompt tokens: when so many come from a cache, prompts have been sent before."""
_FLOOR_SHARE = 0.2
"""Of a measured median: above this, what the client costs by itself is a good part of it."""


def judge(
    samples: Sequence[Sample],
    clients: Sequence[Done],
    figures: Figures,
    options: Options,
    calibration: Calibration | None = None,
    *,
    processes: int = 1,
    lost: int = 0,
    other_cores: float | None = None,
    clock_ms: float = 0.0,
    cached: float = 0.0,
    ended_early: bool = False,
) -> Validity:
    """Of all runs together. `lost`: client processes that ended before their time. `other_cores`: CPU that neither
    clients nor server used; None: not known. `clock_ms`: by how much the time of day moved against the clock.
    `cached`: share of the prompts that the server knew already, though it should not. `ended_early`: by the user."""
    doubts: list[str] = []
    flaws: list[str] = []
    _check_requests(samples, figures, ended_early, doubts, flaws)
    busiest = max((done.cpu_seconds / done.wall_seconds for done in clients if done.wall_seconds), default=0.0)
    more = f" (--processes {2 * processes} shares the load out)"
    _grade(busiest, _BUSY, _SATURATED, "a client process used {:.0%} of a core" + more, doubts, flaws)
    ceiling = calibration.tokens_per_s if calibration is not None else 0.0
    near = figures.output_tokens_per_s / processes / ceiling if ceiling else 0.0
    if near >= _NEAR:
        doubts.append(f"the clients took {near:.0%} of the tokens per second that they can take" + more)
    lag = Distribution.of([late / 1e3 for done in clients for late in done.lag_ms])
    if lag is not None:
        _grade(lag.p99, _LAG_MS, _LAG_HOPELESS_MS, "clients' event loops were {:.0f} ms late (p99)", doubts, flaws)
    send_lag = _send_lag(samples) if figures.latency_from == "intended" else None
    if send_lag is not None:
        late = statistics.fmean(_late(sample) > _LATE_MS / 1e3 for sample in samples)
        _grade(late, _LATE_SHARE, _LATE_HOPELESS, "{:.1%} of the requests were sent late", doubts, flaws)
    if any(done.held_up for done in clients):
        flaws.append(f"requests that were due waited for one of {options.load.max_in_flight} places (--max-in-flight)")
    _check_machine(other_cores, clock_ms, figures.duration_s, doubts)
    if lost:
        flaws.append(f"{lost} of the client processes died during the run")
    floor = calibration.floor_ms if calibration is not None else {}
    _check_floor(figures, floor, doubts)
    _check_tokens(samples, options, cached, doubts)
    reads = sum(sample.reads for sample in samples if sample.arrivals)
    wall = sum(done.wall_seconds for done in clients)
    return Validity(
        verdict="invalid" if flaws else "doubtful" if doubts else "valid",
        reasons=flaws + doubts,
        client_cores=round(processes * sum(done.cpu_seconds for done in clients) / wall, 3) if wall else 0.0,
        busiest_client=round(busiest, 3),
        lag_ms=lag,
        send_lag_ms=send_lag,
        pieces_per_read=round(sum(len(sample.arrivals) for sample in samples) / reads, 3) if reads else 0.0,
        floor_ms=dict(floor),
        floor_protocol=calibration.protocol if calibration is not None else "",
        ceiling_tokens_per_s=ceiling,
        ceiling_share=round(near, 4),
        clock_ms=clock_ms,
        processes=processes,
        lost_processes=lost,
    )


def _grade(value: float, doubt: float, flaw: float, text: str, doubts: list[str], flaws: list[str]) -> None:
    if value >= doubt:
        (flaws if value >= flaw else doubts).append(text.format(value))


def _send_lag(samples: Sequence[Sample]) -> Distribution | None:
    return Distribution.of([_late(sample) for sample in samples if sample.error != INTERRUPTED])


def _late(sample: Sample) -> float:
    """Seconds. The time that a new connection takes is the server's and the network's, not the client's."""
    return max(0.0, sample.sent - sample.connect - sample.intended)


def _check_machine(other_cores: float | None, clock_ms: float, seconds: float, doubts: list[str]) -> None:
    cores = machine_cores()
    if other_cores is not None and other_cores > _FOREIGN_SHARE * cores:
        doubts.append(f"something else used {other_cores:.1f} of this machine's {cores} cores")
    if abs(clock_ms) > max(_CLOCK_MS, 1e3 * _CLOCK_SHARE * seconds):
        doubts.append(f"the time of day moved {clock_ms:.0f} ms against the clock: set by hand, or a suspended machine")


def _check_floor(figures: Figures, floor: Mapping[str, float], doubts: list[str]) -> None:
    for name, measured in (("ttft", figures.ttft_ms), ("itl", figures.itl_ms), ("e2e", figures.e2e_ms)):
        own = floor.get(name, 0.0)
        if measured is not None and own > _FLOOR_SHARE * measured.p50 > 0:
            doubts.append(f"{own:.2f} ms of the {name.upper()} are this client's own ({measured.p50:.2f} ms measured)")


def _check_requests(
    samples: Sequence[Sample], figures: Figures, ended_early: bool, doubts: list[str], flaws: list[str]
) -> None:
    if not figures.completed:
        flaws.append("no request was completed")
    elif figures.failed:
        doubts.append(f"{figures.failed} requests failed")
    cut = sum(sample.error == INTERRUPTED for sample in samples)
    if cut > _CUT * len(samples) and not ended_early:
        doubts.append(f"{cut} of {len(samples)} requests were cut off after --grace: the slowest are in no figure")


def _check_tokens(samples: Sequence[Sample], options: Options, cached: float, doubts: list[str]) -> None:
    """Counts that do not agree: what was asked for, what the server counts, what the workload's tokenizer counts."""
    good = [sample for sample in samples if not sample.error]
    if options.target.ignore_eos:
        other = sum(s.output_tokens not in (None, s.wanted_output_tokens) for s in good if s.wanted_output_tokens)
        if other:
            doubts.append(f"{other} of {len(good)} answers are not as long as was asked for (ignore_eos)")
    unequal = sum(
        s.wanted_prompt_tokens is not None and s.prompt_tokens not in (None, s.wanted_prompt_tokens) for s in good
    )
    if unequal:
        doubts.append(f"the server counts other prompt tokens than the workload in {unequal} of {len(good)} requests")
    if cached >= _KNOWN:
        doubts.append(
            f"at least {cached:.0%} of the prompt tokens came from the server's prefix cache, as from a run before; "
            "another --seed makes others"
        )
