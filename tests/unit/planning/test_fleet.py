"""Failures, autoscaling, and fleets of which only a part is simulated."""

from __future__ import annotations

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.planning.fleet import State
from penstock.planning.goals import bounds_of, failure_reports, slices
from penstock.planning.options import ScalingOptions, options
from penstock.planning.simulate import Autoscaler
from support.planning import planned

BUSY = {"rate": 8, "requests": 80, "prompt_tokens": 200, "output_tokens": 100, "start_seconds": 5}


def test_a_lost_zone_s_streams_go_on_in_the_others() -> None:
    lost = planned(replicas=4, zones=2, failure=["zone=1@4"], **BUSY)
    assert all(not flight.error and flight.num_tokens == 100 for flight in lost.flights)
    bounds = bounds_of(options({"slo": ["ttft_p95:150"]}))
    [report] = failure_reports(lost, slices(lost, bounds), bounds)
    assert report.hit == report.resumed + report.moved > 0
    assert report.resumed > 0
    assert [replica.zone for replica in lost.fleet.in_state(State.READY)] == [0, 0]
    figures = lost.fleet_figures(lost.figures())
    assert figures.resumed >= report.resumed
    assert figures.replicas_most == 4
    undisturbed = planned(replicas=4, zones=2, **BUSY)
    assert lost.fleet.paid_seconds() < undisturbed.fleet.paid_seconds()


def test_without_resuming_they_fail() -> None:
    lost = planned(replicas=4, zones=2, failure=["zone=1@4+3"], resume=False, **BUSY)
    failed = [flight for flight in lost.flights if flight.error]
    assert {flight.error for flight in failed} == {"stream_error"}
    [had] = lost.hit.values()
    assert set(failed) == {flight for flight, tokens in had.items() if tokens}
    assert lost.figures().errors == {"stream_error": len(failed)}
    # it comes back when its zone does and the model is loaded
    assert len(lost.fleet.in_state(State.READY)) == 4


def test_streams_wait_for_the_only_replica_and_new_requests_do_not() -> None:
    lost = planned(replicas=1, failure=["replica=0@4"], **BUSY | {"rate": 2})
    [had] = lost.hit.values()
    assert had
    assert all(not flight.error for flight in had)
    assert all(flight.longest_gap > 5 for flight, tokens in had.items() if tokens)
    refused = {flight.error for flight in lost.flights if 4 < flight.due < 9}
    assert "http_503" in refused
    assert all(not flight.error for flight in lost.flights if flight.due > 9.1)


def test_a_fleet_grows_with_its_load_and_shrinks_without_losing_a_request() -> None:
    scaled = planned(
        autoscale="2:6",
        start_seconds=3,
        scale_interval=2,
        scale_in_after=6,
        scale_in_pause=2,
        num_kv_blocks=60,
        prompt_tokens=200,
        output_tokens=60,
        rate=12,
        arrival="constant",
        ramp=20,
        requests=200,
    )
    assert all(not flight.error for flight in scaled.flights)
    serving = [look.serving for look in scaled.looks]
    assert serving[0] == 2
    assert max(serving) == 4, "twice as many in a minute"
    figures = scaled.fleet_figures(scaled.figures())
    assert 2 < figures.replicas_mean < figures.replicas_most == max(serving)
    quiet = planned(
        autoscale="1:6", replicas=6, scale_interval=2, scale_in_after=4, scale_in_pause=2, **BUSY | {"rate": 4}
    )
    assert all(not flight.error for flight in quiet.flights)
    assert quiet.looks[0].serving == 6
    assert quiet.looks[-1].serving < 6


def test_the_autoscaler_follows_kubernetes_rule() -> None:
    scaler = Autoscaler(
        ScalingOptions(autoscale="2:10", scale_queue=4, scale_kv=0.5, scale_in_after=60, scale_in_pause=30)
    )
    assert scaler.number(0, 2, waiting=0, kv_use=0.0) == 2
    assert scaler.number(10, 2, waiting=40, kv_use=0.0) == 4, "twice as many in a minute"
    assert scaler.number(20, 4, waiting=0, kv_use=2.1) == 4, "near enough"
    assert scaler.number(71, 4, waiting=0, kv_use=3.4) == 7, "by the KV cache"
    assert scaler.number(80, 7, waiting=0, kv_use=0.0) == 7, "more were needed a moment ago"
    assert scaler.number(135, 7, waiting=0, kv_use=0.0) == 6
    assert scaler.number(140, 6, waiting=0, kv_use=0.0) == 6, "one at a time"
    assert scaler.number(170, 6, waiting=0, kv_use=0.0) == 5


def test_requests_that_are_refused_end() -> None:
    """The queues of all replicas are full, or the request can never run."""
    full = planned(replicas=2, max_num_seqs=1, max_queued_requests=2, **BUSY | {"rate": 50})
    assert full.figures().errors["http_503"] > 20
    assert full.figures().completed >= 6
    assert full.fleet_figures(full.figures()).failed_over > 0
    long = planned(max_model_len=250, **BUSY)
    assert long.figures().errors == {"http_400": 80}


def test_a_part_of_the_gateways_stands_for_all() -> None:
    settings = BUSY | {"rate": 20, "requests": 200, "replicas": 8, "replicas_per_gateway": 1}
    part, whole = planned(simulated_gateways=2, **settings), planned(**settings)
    assert (len(part.flights), len(whole.flights)) == (50, 200)
    few, all_ = part.figures(), whole.figures()
    assert few.completed == all_.completed == 200
    assert few.output_tokens == all_.output_tokens
    assert few.ttft_ms is not None
    assert all_.ttft_ms is not None
    assert few.ttft_ms.p50 == pytest.approx(all_.ttft_ms.p50, rel=0.1)
    assert part.fleet_figures(few).replicas_most == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"failure": ["zone=2@4"], "zones": 2}, "there are 2 zones"),
        ({"failure": ["disk=2@4"]}, "is not like replica=3@30"),
        ({"autoscale": "4:2"}, "least and most replicas"),
        ({"find_replicas": True}, "which bounds"),
        ({"simulated_gateways": 1, "replicas": 100}, "needs --rate or --trace"),
        ({"simulated_gateways": 1, "autoscale": "1:2", "rate": 1}, "autoscale looks at all"),
        ({"simulated_gateways": 1, "failure": ["replica=0@1"], "rate": 1}, "zones can fail"),
        ({"tokenizer": "folder"}, "only needed to count"),
        ({"trace": "/nothing"}, "No such file"),
        ({"price": "much"}, "price: Expected"),
        ({"max_num_batched_tokens": 8}, "must be at least max_num_seqs"),
    ],
)
def test_what_cannot_be_is_told(settings: dict[str, object], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        planned(**settings)
