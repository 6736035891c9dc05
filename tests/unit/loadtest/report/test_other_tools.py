"""The same run under vLLM bench's and AIPerf's names: equal names, other meanings, computed by hand.

Request 0 (milliseconds): begins 200 before its send, first piece after 300, then 200 and 300, so 800 to its last piece,
5 tokens. Request 1: 300 to the first piece, then 100, 2 tokens. Request 2: 200, one token. One failed, one was cut off.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.other_tools import aiperf_result, vllm_result

MakeReport = Callable[..., Report]


def test_vllm_figures(make_report: MakeReport, samples: list[Sample]) -> None:
    found = vllm_result(make_report(), samples)
    assert (found["completed"], found["failed"], found["num_prompts"]) == (3, 1, 5)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (37, 8)
    assert found["duration"] == pytest.approx(3.0)  # from the start of the run to the failed request's end
    assert found["request_throughput"] == pytest.approx(1.0)
    assert found["output_throughput"] == pytest.approx(8 / 3)
    assert found["total_token_throughput"] == pytest.approx(15.0)
    assert found["median_ttft_ms"] == pytest.approx(300)
    assert found["mean_ttft_ms"] == pytest.approx(800 / 3)
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["p99_e2el_ms"] == pytest.approx(400 + 0.98 * 400)
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["std_itl_ms"] == pytest.approx((20_000 / 3) ** 0.5)
    assert found["request_goodput"] is None


def test_vllm_divides_by_all_tokens_but_one_and_we_by_those_after_the_first_piece(
    make_report: MakeReport, samples: list[Sample]
) -> None:
    report = make_report()
    found = vllm_result(report, samples[:1])
    assert found["mean_tpot_ms"] == pytest.approx(500 / 4)
    assert report.tpot_ms is not None
    assert report.tpot_ms.max == pytest.approx(500 / 3, abs=1e-3)


def test_vllm_peaks(make_report: MakeReport, samples: list[Sample]) -> None:
    """From 0.8 s on, when the first begins: pieces at 0.3, 0.5, 0.8 and at 1.5, 1.6, 1.4 s; it counts pieces."""
    found = vllm_result(make_report(), samples)
    assert found["max_output_tokens_per_s"] == 3
    assert found["max_concurrent_requests"] == 2


def test_vllm_takes_all_that_touch_a_second_for_concurrent(make_report: MakeReport) -> None:
    """Two one after the other, within a second, and one that reaches from that second to the next."""
    times = [(0.0, 0.4), (0.5, 0.9), (0.95, 1.5)]
    samples = [
        Sample(index=index, intended=sent, sent=sent, arrivals=[ended], ended=ended, output_tokens=1)
        for index, (sent, ended) in enumerate(times)
    ]
    assert vllm_result(make_report(), samples)["max_concurrent_requests"] == 3
    assert vllm_result(make_report(), samples[2:])["max_concurrent_requests"] == 1


def test_vllm_settings(make_report: MakeReport, samples: list[Sample]) -> None:
    opened, closed = vllm_result(make_report(), samples), vllm_result(make_report(open_loop=False), samples)
    assert (opened["request_rate"], opened["burstiness"], opened["model_id"]) == (4.0, 1.0, "tiny")
    assert (closed["request_rate"], closed["max_concurrency"]) == ("inf", 8)


def test_vllm_goodput_is_of_its_own_figures(make_report: MakeReport, samples: list[Sample]) -> None:
    report = make_report(goodput="ttft:250")
    assert report.goodput is not None
    assert report.goodput.good == 2  # 100 and 200 ms from the intended moment
    # vLLM's first request also waits for its connection: 300 ms
    assert vllm_result(report, samples)["request_goodput"] == pytest.approx(1 / 3)


def test_aiperf_figures(make_report: MakeReport, samples: list[Sample]) -> None:
    found = aiperf_result(make_report(goodput="tpot:110"), samples)
    assert found["time_to_first_token"]["p50"] == pytest.approx(300)
    assert found["time_to_first_token"]["count"] == 3
    assert found["request_latency"]["max"] == pytest.approx(800)
    assert found["request_latency"]["sum"] == pytest.approx(1400)
    assert found["benchmark_duration"] == {"unit": "sec", "avg": pytest.approx(2.2)}  # from the first request on
    assert found["request_throughput"] == {"unit": "requests/sec", "avg": pytest.approx(3 / 2.2)}
    assert found["output_token_throughput"]["avg"] == pytest.approx(8 / 2.2)
    assert found["output_sequence_length"]["avg"] == pytest.approx(8 / 3)
    assert found["error_request_count"]["avg"] == 1
    assert found["good_request_count"]["avg"] == 2  # 125 ms, 100 ms, and one without the figure
    assert found["error_summary"][0]["error_details"] == {"type": "http_503", "message": "queue is full"}


def test_aiperf_counts_the_failures_of_one_run(make_report: MakeReport, samples: list[Sample]) -> None:
    found = aiperf_result(make_report(runs=[samples, samples]), samples)
    assert [each["count"] for each in found["error_summary"]] == [found["error_request_count"]["avg"]] == [1]


def test_aiperf_calls_our_gaps_inter_chunk_and_our_tpot_inter_token(
    make_report: MakeReport, samples: list[Sample]
) -> None:
    found = aiperf_result(make_report(), samples)
    assert found["inter_chunk_latency"]["avg"] == pytest.approx((200 + 300 + 100) / 3)
    assert found["inter_token_latency"]["avg"] == pytest.approx((500 / 4 + 100) / 2)
    assert found["output_token_throughput_per_user"]["max"] == pytest.approx(10)


def test_aiperf_leaves_out_what_there_is_not(make_report: MakeReport, samples: list[Sample]) -> None:
    whole = aiperf_result(make_report(), [replace(samples[2], arrivals=[])])  # not streamed
    assert "time_to_first_token" not in whole
    assert "inter_token_latency" not in whole
    assert whole["request_latency"]["p99"] == pytest.approx(200)
    assert "error_request_count" not in whole
    assert aiperf_result(make_report(), [samples[2]])["time_to_first_token"]["p50"] == pytest.approx(200)


def test_empty_runs(make_report: MakeReport) -> None:
    report = make_report(runs=[[]], goodput="ttft:1")
    assert vllm_result(report, [])["mean_ttft_ms"] == 0
    assert vllm_result(report, [])["request_throughput"] == 0
    assert aiperf_result(report, [])["request_count"] == {"unit": "requests", "avg": 0.0}
