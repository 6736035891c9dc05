"""Which row of runs is meant, and what does not go together."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.main import main, status, write_row
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options, OutputOptions
from penstock.loadtest.search.findings import sweep_findings
from penstock.loadtest.search.model import SweepReport
from penstock.loadtest.search.runs import Run
from penstock.loadtest.search.study import Findings
from penstock.loadtest.search.sweep import run_sweep
from unit.loadtest.search.computed import URL, ComputedServer, answered, chosen, report_of


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sweep": "rate=1", "find": "rate"}, "sweep and find: one of them"),
        ({"sweep": "rate=1", "vs": "http://other"}, "sweep and vs: one of them"),
        ({"slo": ("ttft_p99:1",)}, "slo: means something only with --find"),
        ({"precision": "0.1", "sweep": "rate=1"}, "only with --find"),
        ({"vs_model": "m"}, "vs-model: means something only with --vs"),
        ({"find": "speed"}, "find: Invalid enum value"),
        ({"sweep": "rate=1", "vllm_json": "x"}, "single run"),
        ({"sweep": "rate=0"}, "above 0"),
        ({"find": "concurrency"}, "--slo"),
        ({"json": "/no/such/folder/out.json"}, "cannot be written"),
        ({"sweep": "rate=1", "html": "/no/such/folder/out.html"}, "cannot be written"),
        ({"json": "-", "markdown": "-"}, "only one form"),
        ({"csv": "/tmp"}, "is a folder"),
        ({"protocol": "kserve-http", "model": "m", "goodput": ("ttft:20",)}, "kserve-http has no ttft"),
        ({"model": "m", "stream": False, "goodput": ("ttft:20",)}, "not streamed have no ttft"),
        ({"find": "rate", "slo": ("ttft_p99:20",), "protocol": "kserve-grpc"}, "slo: kserve-grpc has no ttft"),
        ({"find": "rate", "slo": ("ttft_p99:20",), "protocol": "openai-embeddings"}, "openai-embeddings has no ttft"),
        ({"find": "rate", "slo": ("itl_max:20",), "stream": False}, "slo: answers that are not streamed have no itl"),
        ({"find": "rate", "slo": ("goodput:1",), "goodput": ("tpot:1",), "stream": False}, "not streamed have no tpot"),
        ({"sweep": "rate=1,2", "model": "m", "stream": False, "goodput": ("tpot:1",)}, "not streamed have no tpot"),
        ({"sweep": "concurrency=1,64", "requests": 63}, "63 requests are never 64 at a time"),
    ],
)
def test_what_does_not_go_together(settings: Mapping[str, object], said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        main({"url": URL, **settings})


@pytest.mark.parametrize(
    ("verdicts", "failed", "strict", "expected"),
    [
        (["valid"], 0, True, 0),
        (["valid", "invalid"], 0, False, 0),
        (["valid", "invalid"], 1, True, 3),
        (["valid", "valid"], 1, True, 4),
        (["valid"], 1, False, 0),
        (["doubtful"], 0, True, 0),
    ],
)
def test_exit_statuses(verdicts: list[str], failed: int, strict: bool, expected: int) -> None:
    bad = [Sample(index=1, intended=0.0, sent=0.0, ended=1.0, error="timeout")] * failed
    reports = [report_of(chosen(), [answered(0, 0.0, 0.0, 1.0), *bad], verdict) for verdict in verdicts]
    assert status(reports, chosen(strict=strict)) == expected


@pytest.mark.parametrize(
    ("row", "refused", "expected"),
    [
        ({"sweep": "rate=1,2"}, {1: 2}, 0),
        ({"sweep": "rate=1,2"}, {1: 2, 2: 2}, 1),
        ({"vs": "http://b", "rate": 1}, {1: 4}, 1),
        ({"vs": "http://b", "rate": 1}, {}, 0),
    ],
)
def test_a_row_in_which_nothing_was_completed_has_measured_nothing(
    row: Mapping[str, object], refused: Mapping[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = dict(refused)

    def run(settings: Options, text: str) -> Run:
        rate = int(settings.load.rate or 0)
        bad = left.get(rate, 0) > 0 and settings.target.url == URL
        left[rate] = left.get(rate, 0) - bad
        sample = answered(0, 0.0, 0.0, 1.0)
        return Run(report_of(settings, [replace(sample, error="http_503") if bad else sample]), 1.0)

    monkeypatch.setattr("penstock.loadtest.main.RealRunner", lambda: run)
    assert main({"url": URL, "model": "m", **row}) == expected


def test_a_row_that_is_being_written_is_not_lost_to_ctrl_c() -> None:
    seen = []

    def describe(study: SweepReport) -> Findings:
        seen.append(signal.getsignal(signal.SIGINT))
        return sweep_findings(study)

    before = signal.getsignal(signal.SIGINT)
    write_row(run_sweep(chosen(sweep="rate=2"), ComputedServer()), describe, OutputOptions())
    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before
