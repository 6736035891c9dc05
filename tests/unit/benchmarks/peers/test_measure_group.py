"""Whose turn it is, and who is left out; with servers that answer as they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.measure_group import GroupMeasurement
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.plan import Case, plan
from benchmarks.peers.results import PeersReport, Run
from benchmarks.peers.served import Served
from benchmarks.peers.settings import PeersSettings, settings
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Figures, summarize
from penstock.loadtest.report.model import Validity


def figures_of(seconds: float, tokens: int, error: str = "") -> Figures:
    arrivals = [seconds * (token + 1) / tokens for token in range(tokens)]
    sample = Sample(index=0, intended=0, sent=0, ended=seconds, arrivals=arrivals, error=error, detail="busy")
    return summarize([sample], open_loop=False)


class Told(Served):
    def __init__(self, name: str, calls: list[tuple[str, int, int]], seconds: float = 1.0, tokens: int = 4) -> None:
        self._name, self._calls = name, calls
        self._seconds, self._tokens = seconds, tokens
        self.error = ""
        self.trial_tokens = tokens
        self.trials = self.tokens_tried = 0

    @property
    def pid(self) -> int:
        return 0

    def try_out(self, case: Case, settings: PeersSettings, requests: int) -> Figures:  # type: ignore[override]
        self.trials += 1
        self.tokens_tried = settings.output_tokens
        return figures_of(1.0, self.trial_tokens * requests)

    def measure(self, case: Case, settings: PeersSettings, seed: int) -> Run:
        self._calls.append((self._name, case.concurrency, seed))
        return Run(
            figures=figures_of(self._seconds, self._tokens, self.error),
            validity=Validity(verdict="valid"),
            server_cores=1,
            server_cpu_us=1,
            front_cpu_us=1,
            foreign_cores=0,
        )


@pytest.fixture
def calls() -> list[tuple[str, int, int]]:
    return []


def measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *servers: Told, tokens: int = 4) -> GroupMeasurement:
    chosen = settings(
        {"dir": "d", "only": ["vllm"], "models": ["tiny"], "concurrency": [1, 2], "output_tokens": tokens}
        | {"longest": 10, "sampled": []}
    )
    [group] = plan(chosen)
    report = PeersReport(date="2026-01-01", command="c", settings=chosen, environment={}, versions={})
    made = GroupMeasurement(group, PeersFolder(tmp_path), report, lambda text: None)
    up = dict(zip(group.contenders, servers, strict=False))

    def start(contender: object, *more: object) -> None:
        name = contender.name  # type: ignore[attr-defined]
        if name not in up:
            raise LoadTestError("no such engine")
        made._up[name] = up[name]

    monkeypatch.setattr(made, "_start", start)
    return made


def test_all_take_turns_and_who_begins_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]]
) -> None:
    servers = [Told(name, calls) for name in "abc"]
    made = measurement(tmp_path, monkeypatch, *servers)
    made.run()
    assert "".join(name for name, concurrency, _ in calls if concurrency == 1) == "abcbcacab"
    assert [seed for *_, seed in calls][:9] == [0, 0, 0, 1, 1, 1, 2, 2, 2], "the same requests in a round"
    assert [server.trials for server in servers] == [1, 1, 1], "the second case asks the same question"
    assert {server.tokens_tried for server in servers} == {4}
    assert [len(cell.runs) for case in made.result.cases for cell in case.cells.values()] == [3] * 6


def test_trials_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]]) -> None:
    server = Told("a", calls, tokens=128)
    server.trial_tokens = 16
    made = measurement(tmp_path, monkeypatch, server, tokens=128)
    made.run()
    assert server.tokens_tried == 16
    assert [len(case.cells["vllm"].runs) for case in made.result.cases] == [3, 3]


def test_a_slow_server_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]]
) -> None:
    made = measurement(tmp_path, monkeypatch, Told("a", calls, seconds=50), Told("b", calls))
    made.run()
    assert [call for call in calls if call[0] == "a"] == [("a", 1, 0)]
    assert made.result.cases[1].cells["vllm"].failure == "left out: with fewer at a time a run took 50 s"
    assert len([call for call in calls if call[0] == "b"]) == 6
    assert made.result.failures == dict.fromkeys(("penstock-vllm-engine", "penstock"), "no such engine")


def test_wrong_answers_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]]
) -> None:
    short, failing = Told("a", calls), Told("b", calls)
    short.trial_tokens, failing.error = 3, "http_503"
    made = measurement(tmp_path, monkeypatch, short, failing)
    made.run()
    cells = made.result.cases[0].cells
    assert cells["vllm"].failure == "12 output tokens instead of 16"
    assert cells["penstock-vllm"].failure == "1 requests failed: http_503: busy"
    assert calls == [("b", 1, 0), ("b", 2, 0)], "a failed run ends a case"
    assert not any(cell.runs for case in made.result.cases for cell in case.cells.values())


def test_penstock_alone_is_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]]
) -> None:
    made = measurement(tmp_path, monkeypatch)
    made.run()
    assert (calls, made.result.cases) == ([], [])
    assert set(made.result.failures) == {"vllm", "penstock-vllm", "penstock-vllm-engine", "penstock"}
