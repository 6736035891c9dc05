from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.loadtest.calibrate import Calibration
from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.job import Done
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import summarize
from penstock.loadtest.options import options
from penstock.loadtest.report.model import Validity
from penstock.loadtest.validity import judge

CALM = Done(cpu_seconds=0.1, wall_seconds=1.0, lag_ms=[0.1] * 50)
FLOOR = Calibration(protocol="openai-chat", floor_ms={"ttft": 0.2, "itl": 0.01}, tokens_per_s=100.0)


def sample(number: int = 0, late: float = 0.0, **fields: Any) -> Sample:
    """Four tokens: the first after 50 ms, then one each 10 ms."""
    sent = number + late
    arrivals = [sent + 0.05 + 0.01 * n for n in range(4)]
    plain = Sample(
        index=number,
        intended=float(number),
        sent=sent,
        ended=arrivals[-1],
        arrivals=arrivals,
        reads=4,
        wanted_output_tokens=4,
        output_tokens=4,
    )
    return msgspec.structs.replace(plain, **fields)


def judged(
    samples: list[Sample] | None = None,
    clients: list[Done] | None = None,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Validity:
    samples = [sample(n) for n in range(10)] if samples is None else samples
    chosen = options({"url": "http://x"} | (settings or {}))
    figures = summarize(samples, open_loop=chosen.load.rate is not None)
    return judge(samples, [CALM] if clients is None else clients, figures, chosen, **more)


def test_nothing_to_say_against_it() -> None:
    found = judged(calibration=FLOOR, other_cores=0.0)
    assert (found.verdict, found.reasons) == ("valid", [])
    assert (found.client_cores, found.busiest_client, found.pieces_per_read) == (0.1, 0.1, 1.0)
    assert (found.floor_ms, found.ceiling_tokens_per_s) == ({"ttft": 0.2, "itl": 0.01}, 100.0)
    assert found.ceiling_share == pytest.approx(40 / 9.08 / 100, rel=1e-2)


def test_cores_are_those_of_all_processes_in_one_run() -> None:
    busy = Done(cpu_seconds=0.6, wall_seconds=2.0, lag_ms=[])
    assert judged(clients=[CALM, busy], processes=2).client_cores == round(2 * 0.7 / 3.0, 3)
    assert judged(clients=[busy] * 6, processes=2).client_cores == 0.6, "three runs of two processes"


@pytest.mark.parametrize(
    ("cpu", "lag", "verdict", "reason"),
    [
        (0.75, 0.1, "doubtful", "75% of a core (--processes 2"),
        (0.95, 0.1, "invalid", "95% of a core"),
        (0.1, 20.0, "doubtful", "20 ms late"),
        (0.1, 60.0, "invalid", "60 ms late"),
    ],
)
def test_a_client_short_of_time(cpu: float, lag: float, verdict: str, reason: str) -> None:
    found = judged(clients=[CALM, Done(cpu_seconds=2 * cpu, wall_seconds=2.0, lag_ms=[lag] * 50)])
    assert found.verdict == verdict
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]


@pytest.mark.parametrize(("late", "verdict"), [(0, "valid"), (3, "doubtful"), (20, "invalid")])
def test_requests_sent_late(late: int, verdict: str) -> None:
    samples = [sample(n, late=0.1 if n < late else 0.0) for n in range(100)]
    found = judged(samples, settings={"rate": 1})
    assert found.verdict == verdict
    assert found.send_lag_ms is not None
    assert judged(samples).verdict == "valid", "in a closed loop nothing is late"


def test_open_loops_that_ran_out_of_places() -> None:
    found = judged(clients=[msgspec.structs.replace(CALM, held_up=True)], settings={"rate": 1, "max_in_flight": 7})
    assert found.verdict == "invalid"
    assert "7 places" in found.reasons[0]


def test_near_the_ceiling() -> None:
    near = msgspec.structs.replace(FLOOR, tokens_per_s=5.0)
    found = judged(calibration=near)
    assert found.verdict == "doubtful"
    assert "88%" in found.reasons[0]
    assert judged(calibration=near, processes=2).verdict == "valid"


@pytest.mark.parametrize("floor", [{"ttft": 11.0}, {"itl": 2.1}, {"e2e": 17.0}])
def test_a_floor_that_is_a_good_part_of_the_figure(floor: dict[str, float]) -> None:
    found = judged(calibration=msgspec.structs.replace(FLOOR, floor_ms=floor))
    assert found.verdict == "doubtful"
    assert "this client's own" in found.reasons[0]


def test_a_new_connection_is_not_the_clients_lateness() -> None:
    samples = [sample(n, late=0.1, connect=0.099) for n in range(100)]
    assert judged(samples, settings={"rate": 1}).verdict == "valid"


def test_requests_that_outlasted_the_run() -> None:
    ended = [sample(n) for n in range(100)]
    cut = [sample(n, error=INTERRUPTED) for n in range(2)]
    assert judged([*ended, *cut[:1]]).verdict == "valid"
    found = judged([*ended, *cut])
    assert found.verdict == "doubtful"
    assert "2 of 102 requests were cut off" in found.reasons[0]
    assert judged([*ended, *cut], ended_early=True).verdict == "valid", "the user knows"


def test_prompts_that_the_server_knew() -> None:
    assert judged(cached=0.29).verdict == "valid"
    found = judged(cached=0.6)
    assert found.verdict == "doubtful"
    assert found.reasons[0].startswith("at least 60% of the prompt tokens came from the server's prefix cache")


def test_others_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine, also for a client that has been confined to one of its cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert judged(other_cores=0.9).verdict == "valid"
    found = judged(other_cores=1.5)
    assert (found.verdict, found.reasons) == ("doubtful", ["something else used 1.5 of this machine's 4 cores"])


@pytest.mark.parametrize(
    ("moved", "verdict"), [(15.0, "valid"), (-15.0, "valid"), (25.0, "doubtful"), (-4e6, "doubtful")]
)
def test_a_clock_that_jumps(moved: float, verdict: str) -> None:
    assert judged(clock_ms=moved).verdict == verdict


def test_processes_that_died() -> None:
    found = judged(lost=1)
    assert (found.verdict, found.lost_processes) == ("invalid", 1)


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"output_tokens": 3}, {}, "not as long"),
        ({"wanted_prompt_tokens": 7, "prompt_tokens": 9}, {}, "other prompt tokens"),
        ({"error": "http_500"}, {}, "1 requests failed"),
    ],
)
def test_answers_that_are_not_what_was_asked_for(fields: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    found = judged([sample(0), sample(1, **fields)], settings=settings)
    assert found.verdict == "doubtful"
    assert reason in found.reasons[0]


def test_lengths_are_free_where_the_model_may_end() -> None:
    assert judged([sample(output_tokens=3)], settings={"ignore_eos": False}).verdict == "valid"


def test_nothing_complete() -> None:
    assert judged([sample(error="connect")]).verdict == "invalid"
    assert judged([], []).verdict == "invalid"
