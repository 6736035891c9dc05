"""Two servers in turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtest.options import Options
from penstock.loadtest.report.figures import COMPARED, Figure
from penstock.loadtest.search.findings import comparison_findings
from penstock.loadtest.search.model import VersusReport
from penstock.loadtest.search.runs import Run
from penstock.loadtest.search.versus import SAME, difference, run_versus
from unit.loadtest.search.computed import URL, ComputedServer, chosen

OTHER = "http://other:8000"
RATE = next(figure for figure in COMPARED if figure.path == "requests_per_s")
LATENCY = next(figure for figure in COMPARED if figure.path == "e2e_ms.p50")
SHARE = next(figure for figure in COMPARED if figure.path == "goodput.share")


class Two:
    """Servers by address."""

    def __init__(self, **servers: ComputedServer) -> None:
        self.servers = {URL: servers.get("a", ComputedServer()), OTHER: servers.get("b", ComputedServer())}
        self.ran: list[Options] = []

    def __call__(self, settings: Options, text: str) -> Run:
        self.ran.append(settings)
        return self.servers[settings.target.url](settings, text)


def versus(two: Two, **settings: object) -> VersusReport:
    return run_versus(chosen(vs=OTHER, duration=10, **settings), two)


def verdicts(study: VersusReport) -> dict[str, str]:
    return {one.figure: one.verdict for one in study.differences}


def test_runs_take_turns_with_the_same_requests() -> None:
    two = Two()
    study = versus(two, repeat=4)
    assert study.order == "ABBAABBA"
    assert [{URL: "A", OTHER: "B"}[settings.target.url] for settings in two.ran] == list("ABBAABBA")
    assert [settings.workload.seed for settings in two.ran] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(study.a.runs) == len(study.b.runs) == 4


def test_a_slower_server_is_found() -> None:
    study = versus(Two(b=ComputedServer(seconds=0.25)), repeat=4, concurrency=4)
    found = {one.figure: one for one in study.differences}
    assert found["e2e_ms.p50"].ratio == pytest.approx(1.25)
    assert found["requests_per_s"].ratio == pytest.approx(0.8, rel=0.02)
    assert found["e2e_ms.p50"].verdict == found["requests_per_s"].verdict == "slower"
    assert f"{OTHER} is slower than {URL}" in " ".join(comparison_findings(study).answer)


def test_the_same_server_twice_shows_no_difference() -> None:
    study = versus(Two(), repeat=4)
    assert set(verdicts(study).values()) == {SAME}


def test_one_pair_says_nothing() -> None:
    study = versus(Two(), repeat=1)
    assert {(one.low, one.verdict) for one in study.differences} == {(None, "")}


def test_the_other_server_has_settings_of_its_own() -> None:
    two = Two()
    study = versus(
        two, repeat=1, vs_model="m2", vs_label="new", vs_extra='{"a": 1}', vs_api_key="k2", api_key="k1", label="old"
    )
    a, b = two.ran[0].target, two.ran[1].target
    assert (a.url, a.model, a.extra, a.api_key) == (URL, "m", "{}", "k1")
    assert (b.url, b.model, b.extra, b.api_key) == (OTHER, "m2", '{"a": 1}', "k2")
    assert (study.a.label, study.b.label) == ("old", "new")


@pytest.mark.parametrize("written", [URL, f"{URL}/v1", "server:8000"])
def test_the_same_address_twice_is_told_apart(written: str) -> None:
    two = Two()
    two.servers.setdefault(written, ComputedServer())
    study = run_versus(chosen(vs=written, repeat=2, duration=5), two)
    assert study.a.label != study.b.label
    seeds = [settings.workload.seed for settings in two.ran]
    assert sorted(seeds) == [0, 1, 2, 3], "what A has sent is in the prefix cache when B comes"


def test_what_is_0_on_one_side_is_told() -> None:
    study = versus(Two(b=ComputedServer(seconds=0.3)), repeat=2, goodput=("e2e:250",), concurrency=4)
    assert "goodput.share" not in verdicts(study)
    assert "Share of good requests: 0 in some run, which makes no ratio; on average A 1.00, B 0" in study.notes
    assert not any("ITL" in note for note in study.notes)


def test_only_whole_pairs_count_when_it_ends_early() -> None:
    server = ComputedServer(spoil=lambda number: KeyboardInterrupt() if number == 2 else None)
    study = versus(Two(b=server), repeat=4)
    assert study.order == "ABBAA"  # the third run of B did not come to its end
    assert len(study.a.runs) == len(study.b.runs) == 2
    assert study.ended_early == "by the user"


positive = st.floats(0.1, 1000)


@given(pairs=st.lists(st.tuples(positive, positive), min_size=2, max_size=6))
def test_changing_sides_inverts_the_ratio_and_its_interval(pairs: list[tuple[float, float]]) -> None:
    one, other = difference(RATE, pairs), difference(RATE, [(b, a) for a, b in pairs])
    assert one.low is not None
    assert one.high is not None
    assert other.low is not None
    assert other.high is not None
    assert one.ratio * other.ratio == pytest.approx(1)
    assert math.log(one.low) == pytest.approx(-math.log(other.high), abs=1e-9)
    assert one.ratio == pytest.approx(one.b / one.a)
    opposite = {"faster": "slower", "slower": "faster", SAME: SAME}
    if min(abs(math.log(one.low)), abs(math.log(one.high))) > 1e-9:
        assert other.verdict == opposite[one.verdict]


def test_the_interval_is_students() -> None:
    """Ratios 1.1 and 1.3: logs 0.09531 and 0.26236, mean 0.17884, sd 0.11812, t 12.706, half 1.0613."""
    found = difference(LATENCY, [(10.0, 11.0), (10.0, 13.0)])
    assert found.ratio == pytest.approx(math.exp(0.178837), rel=1e-5)
    assert found.low == pytest.approx(math.exp(0.178837 - 1.06130), rel=1e-3)
    assert found.high == pytest.approx(math.exp(0.178837 + 1.06130), rel=1e-3)
    assert found.verdict == SAME


@pytest.mark.parametrize(
    ("figure", "more", "less"),
    [(RATE, "faster", "slower"), (LATENCY, "slower", "faster"), (SHARE, "better", "worse")],
)
def test_what_more_means(figure: Figure, more: str, less: str) -> None:
    assert difference(figure, [(1.0, 2.0), (1.0, 2.01)]).verdict == more
    assert difference(figure, [(2.0, 1.0), (2.01, 1.0)]).verdict == less
