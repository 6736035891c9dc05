"""Figures, the search, and the command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.configuration.command_parser import CommandParser
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.metrics import Distribution
from penstock.loadtest.options import LoadOptions, WorkloadOptions
from penstock.loadtest.workload.build import build
from penstock.planning.commands import plan
from penstock.planning.figures import distribution_of
from penstock.planning.flight import Gaps
from penstock.planning.goals import fewest
from penstock.planning.main import BROKEN, main
from penstock.planning.prompts import load_options, sessions
from support.planning import planned

FLAGS = {"sim_step_ms": "15", "sim_prefill_us": "50", "sim_sequence_us": "500"}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_counted_gaps_have_the_percentiles_of_the_list(milliseconds: list[int]) -> None:
    gaps = Gaps()
    for gap in milliseconds:
        gaps.add(gap / 1e3)
    found, listed = distribution_of(gaps), Distribution.of([gap / 1e3 for gap in milliseconds])
    assert found is not None
    assert listed is not None
    for name in Distribution.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(listed, name), abs=2e-3)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 60))
def test_the_search_finds_the_smallest_number(start: int, most: int, least: int) -> None:
    tried: list[int] = []

    def enough(number: int) -> bool:
        tried.append(number)
        return number >= least

    assert fewest(enough, start, most) == (least if least <= most else None)
    assert len(tried) == len(set(tried)) <= 16
    assert max(tried) <= most


@pytest.mark.parametrize("workload", [{"prompt_tokens_stddev": 50.0, "prefixes": 3, "shared_prefix_tokens": 32}, {}])
def test_the_load_test_s_requests_are_planned(workload: dict[str, float]) -> None:
    """Equal times and lengths: a plan and a load test with the same settings are about the same requests."""
    chosen = WorkloadOptions(requests=20, output_tokens_stddev=9.0, seed=5, **workload)  # type: ignore[arg-type]
    load = LoadOptions(rate=3.0)
    ours, theirs = list(sessions(chosen, load)), list(build(load_options(chosen, load)))
    assert [session.at for session in ours] == [session.at for session in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert own.calls[0].output_tokens == other.calls[0].output_tokens
        assert len(own.calls[0].prompt) == len(str(other.calls[0].prompt).split())


def test_a_trace_s_blocks_are_found_in_the_prefix_cache(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 10 + n]} for n in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    run = planned(trace=str(trace), replicas=2)
    assert [round(flight.due) for flight in run.flights] == [0, 1, 2, 3, 4, 5]
    assert run.fleet_figures(run.figures()).prefix_hits == pytest.approx(5 / 6 * 1024 / 1100, abs=0.01)
    with pytest.raises(LoadTestError, match="a trace has its own times"):
        planned(trace=str(trace), rate=3)


@pytest.mark.parametrize("load", [{"concurrency": 2}, {"rate": 1}])
def test_no_turn_is_sent_after_the_duration(load: dict[str, int]) -> None:
    run = planned(turns=4, prompt_tokens=16, output_tokens=4, turn_delay=3, duration=10, **load)
    assert run.clients.done
    assert 8 < max(flight.due for flight in run.flights) <= 10


def test_turns_find_their_history_in_the_prefix_cache() -> None:
    run = planned(turns=4, requests=16, prompt_tokens=160, output_tokens=32, concurrency=4, turn_delay=1)
    lengths = [flight.num_prompt_tokens for flight in run.flights]
    assert sorted(set(lengths)) == [160, 352, 544, 736]
    # each time all that was there before, but the last block of it, which the answer's last token has not filled
    assert run.fleet_figures(run.figures()).prefix_hits == pytest.approx(
        (176 + 368 + 560) / sum((160, 352, 544, 736)), abs=0.02
    )


def test_the_command_says_how_many_replicas_an_slo_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    given = FLAGS | {"rate": "20", "requests": "150", "prompt_tokens": "400", "output_tokens": "40", "price": "3.6"}
    given |= {"slo": ["tpot_p95:30"], "find_replicas": True, "json": str(file)}
    assert main(given) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    needed = report["replicas_needed"]
    assert f"Replicas needed: {needed}" in shown.out
    assert {row["replicas"]: row["held"] for row in report["tries"]}[needed]
    assert not {row["replicas"]: row["held"] for row in report["tries"]}[needed - 1]
    fleet = report["fleet"]
    assert fleet["replica_hours"] == pytest.approx(needed * report["duration_s"] / 3600, rel=1e-3)
    assert fleet["cost"] == pytest.approx(3.6 * fleet["replica_hours"], rel=1e-3)
    assert fleet["cost_per_million_output_tokens"] == pytest.approx(fleet["cost"] / 6000 * 1e6, rel=1e-3)
    del given["find_replicas"]
    assert main(given | {"replicas": str(needed - 1), "json": "-"}) == BROKEN
    assert json.loads(capsys.readouterr().out)["over_slo_s"] > 0


def test_the_command_s_flags_are_made_when_it_is_used() -> None:
    """They take time that the start of a server would lose."""
    commands, made = CommandParser().add_subparsers(), []
    plan(commands, lambda parser, sections, only: made.append(only), argparse.HelpFormatter)
    assert not made
    args = commands.choices["plan"].parse_args([])
    assert callable(args.run_command)
    commands.choices["plan"].parse_args([])
    [only] = made
    assert {"measured", "rate", "trace", "replicas"} <= only
    assert not {"url", "token_ids", "max_in_flight"} & only
