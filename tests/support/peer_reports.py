"""Reports of the peers' benchmark, from runs that nobody measured."""

from __future__ import annotations

import msgspec

from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.plan import plan
from benchmarks.peers.results import CaseResult, Cell, GroupResult, PeersReport, Run
from benchmarks.peers.settings import settings
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import summarize
from penstock.loadtest.report.model import Validity


def run_of(seconds: float, *, verdict: str = "valid", tired: int = 3, foreign: float = 0.0) -> Run:
    """A request of 10 tokens in so many seconds."""
    arrivals = [seconds * (token + 1) / 10 for token in range(10)]
    sample = Sample(index=0, intended=0, sent=0, ended=seconds, arrivals=arrivals, wanted_output_tokens=10)
    reasons = [] if verdict == "valid" else [f"the client was | tired for {tired} s"]
    return Run(
        figures=summarize([sample], open_loop=False),
        validity=Validity(verdict=verdict, reasons=reasons),
        server_cores=1.0,
        server_cpu_us=1e6 * seconds / 10,
        front_cpu_us=5e5 * seconds / 10,
        foreign_cores=foreign,
    )


def report_of(table: str, peer: str, **cells: Cell) -> PeersReport:
    """One case, of the peer and others."""
    [group] = [group for group in plan(settings({"dir": "d", "models": ["tiny"]})) if group.peer == peer]
    case = msgspec.structs.replace(group.cases[0], concurrency=4)
    named = {name.replace("_", "-"): cell for name, cell in cells.items()}
    return PeersReport(
        date="2026-01-01T00:00:00+00:00",
        command="python loadtest/benchmarks peers --dir d",
        settings=settings({"dir": "d"}),
        environment={"cpu": "Some CPU", "cores": 2},
        versions={"penstock": {"penstock": "1"}, peer: {"some": "2"}},
        groups=[
            GroupResult(
                table=table,
                model=group.model,
                titles={name: CONTENDERS[name].title for name in group.contenders},
                pinned=False,
                engines={group.peer: "bf16; 1 thread", "penstock": "f32"},
                ready_seconds=dict.fromkeys(named, 1.5),
                failures={name: "no such engine\n  log: /somewhere" for name in group.contenders if name not in named},
                cases=[CaseResult(case=case, cells=named)],
                settings=settings({"dir": "d"}),
                date="2026-01-01T00:00:00+00:00",
                command="python loadtest/benchmarks peers --dir d",
            )
        ],
    )
