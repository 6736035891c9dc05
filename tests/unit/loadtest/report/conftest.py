"""A small run whose figures can be computed by hand, and reports made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Distribution, summarize
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.repeats import intervals, medians
from penstock.loadtest.report.histogram import histograms
from penstock.loadtest.report.model import Report, ServerWatch, Validity
from penstock.loadtest.run import timeline

MakeReport = Callable[..., Report]


@pytest.fixture
def samples() -> list[Sample]:
    """Seconds. 0: five tokens in three pieces, the first of two tokens, on a new connection. 1: two tokens in two
    pieces, due 0.5 s before it was sent. 2: one token. 3: failed. 4: cut off at the end."""
    return [
        Sample(
            index=0,
            tag="chat",
            intended=1.0,
            sent=1.0,
            connect=0.2,
            arrivals=[1.1, 1.3, 1.6],
            pieces=[2, 2, 1],
            ended=2.0,
            reads=3,
            prompt_tokens=10,
            output_tokens=5,
            wanted_output_tokens=5,
            finish_reason="length",
        ),
        Sample(
            index=1, intended=1.5, sent=2.0, arrivals=[2.3, 2.4], ended=2.5, reads=2, prompt_tokens=20, output_tokens=2
        ),
        Sample(
            index=2, intended=2.0, sent=2.0, arrivals=[2.2], ended=2.2, reads=1, wanted_prompt_tokens=7, output_tokens=1
        ),
        Sample(index=3, intended=2.5, sent=2.5, ended=3.0, error="http_503", detail="queue is full"),
        Sample(index=4, intended=2.9, sent=2.9, ended=9.0, error=INTERRUPTED),
    ]


@pytest.fixture
def make_report(samples: list[Sample]) -> MakeReport:
    """`runs`: the samples of each; other fields as given."""

    def make(
        runs: Sequence[Sequence[Sample]] | None = None, *, open_loop: bool = True, goodput: str = "", **fields: Any
    ) -> Report:
        sets = [samples] if runs is None else runs
        figures = [summarize(each, open_loop=open_loop, objectives=parse_objectives([goodput])) for each in sets]
        load = LoadOptions(rate=4.0 if open_loop else None, goodput=tuple(goodput.split()))
        report: dict[str, Any] = {
            "label": "alpha",
            "date": "2026-11-20T12:00:00+00:00",
            "command": "penstock loadtest --url http://server:8000",
            "options": Options(
                target=Target(url="http://server:8000", model="tiny"), workload=WorkloadOptions(seed=5), load=load
            ),
            "validity": Validity(verdict="valid", client_cores=0.31, busiest_client=0.27, pieces_per_read=1.05),
            "runs": figures,
            "intervals": intervals(figures),
            "timeline": timeline(sets[-1]),
            "histograms": histograms(sets[-1], open_loop=open_loop),
        }
        return Report(**{**medians(figures), **report, **fields})

    return make


@pytest.fixture
def full_report(make_report: MakeReport, samples: list[Sample]) -> Report:
    """With something in every field."""
    runs = [samples, [*samples[:2], *samples[3:]], [*samples, *samples[:1]]]
    lag = Distribution.of([0.001, 0.002, 0.004])
    return make_report(
        runs,
        goodput="ttft:250 tpot:90 e2e:900 itl:280",
        validity=Validity(
            verdict="doubtful",
            reasons=["1 request failed"],
            client_cores=0.31,
            busiest_client=0.27,
            lag_ms=lag,
            send_lag_ms=lag,
            pieces_per_read=1.05,
            floor_ms={"ttft": 0.4},
            floor_protocol="openai-chat",
            ceiling_tokens_per_s=90_000.0,
            ceiling_share=0.07,
            processes=2,
            lost_processes=1,
        ),
        tokens={"output": "usage", "unequal": {"prompt": 3}},
        server=ServerWatch(
            metrics_url="http://server:8000/metrics",
            metrics={"queue_length": [1.0, 3.0]},
            counters={"preemptions_total": 12.0},
            seconds=[0.0, 0.5],
            gpu={"gpu0_utilization": [71.0, 93.0]},
            cores=1.25,
        ),
        environment={"cpu": "a processor", "cores": 2},
        interrupted_by_user=True,
    )
