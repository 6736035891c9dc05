"""Triton's summaries and its histogram of first responses: what is kept of latencies, and how it is shown."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest

from penstock.classic.base import InferModel
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.metrics.prometheus_text import render
from penstock.gateway.metrics.triton import (
    SLICE_NS,
    LatencySettings,
    ModelLatencies,
    SlidingSummary,
    TritonMetrics,
    latency_observers,
    read_metrics_config,
)
from support.kserve import FakeModel

MS = 1_000_000
BUCKETS = (
    "model_metrics { metric_control [ { metric_identifier { family: 'nv_inference_first_response_histogram_ms' }"
    " histogram_options { buckets: [ 1, 2.5 ] } } ] }"
)


def model(config: str = "") -> FakeModel:
    return FakeModel(f"name: 'm' {config}", lambda _: [])


def text_of(latencies: LatencySettings, *models: FakeModel) -> str:
    served = cast("list[InferModel]", models)
    metrics = TritonMetrics(lambda: served, lambda: {("m", 1): 2.0}, latencies=latencies)
    return render(metrics.families()).decode()


def observed(latencies: LatencySettings, config: str = "") -> FakeModel:
    watched = model(config)
    observe = latency_observers(latencies)
    assert observe is not None
    observe(cast(Any, watched))
    return watched


@pytest.mark.parametrize("spread", [100, 10_000, 10**9])
def test_quantiles_are_those_of_all_values(spread: int) -> None:
    draw = random.Random(1)
    values = sorted(draw.randrange(spread) for _ in range(999))
    summary = SlidingSummary()
    for value in draw.sample(values, len(values)):
        summary.observe(value, 0)
    exact = [values[0], values[499], values[899], values[-1]]
    assert summary.quantiles([0, 0.5, 0.9, 1], 0) == [pytest.approx(value, rel=0.004) for value in exact]
    assert (summary.count, summary.sum) == (999, sum(values))


def test_small_values_are_exact() -> None:
    summary = SlidingSummary()
    for value in range(256):
        summary.observe(value, 0)
    assert summary.quantiles([n / 256 for n in range(1, 257)], 0) == list(range(256))


def test_quantiles_are_of_the_last_minute() -> None:
    summary = SlidingSummary()
    summary.observe(1, 0)
    summary.observe(9, 3 * SLICE_NS)
    assert summary.quantiles([0, 1], 5 * SLICE_NS - 1) == [1, 9]
    assert summary.quantiles([0, 1], 5 * SLICE_NS) == [9, 9]
    assert all(map(math.isnan, summary.quantiles([0, 1], 8 * SLICE_NS)))
    summary.observe(5, 100 * SLICE_NS)
    assert summary.quantiles([0, 1], 100 * SLICE_NS) == [5, 5]
    assert (summary.count, summary.sum) == (3, 15)


def test_memory_depends_on_the_spread_of_values_only() -> None:
    summary = SlidingSummary()
    for number in range(50):
        for power in range(63):
            summary.observe(1 << power, number * SLICE_NS)
    assert sum(len(counts) for _, counts in summary._slices) == 5 * 63


def test_settings_are_triton_s() -> None:
    assert read_metrics_config([]) == LatencySettings()
    given = ["counter_latencies=false", "summary_latencies=true", "histogram_latencies=true"]
    found = read_metrics_config([*given, "summary_quantiles=0.25:0.05,1:0.001"])
    assert found == LatencySettings(counters=False, summaries=True, histograms=True, quantiles=(0.25, 1.0))
    assert read_metrics_config(["summary_latencies=true", "summary_latencies=false"]) == LatencySettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("summary_latencies", "is not SETTING=VALUE with one of counter_latencies"),
        ("gauges=true", "is not SETTING=VALUE with one of counter_latencies"),
        ("summary_latencies=yes", "summary_latencies is true or false, not 'yes'"),
        ("summary_quantiles=", "'' is not QUANTILE:ERROR"),
        ("summary_quantiles=0.5", "'0.5' is not QUANTILE:ERROR"),
        ("summary_quantiles=0.5:0.1,2:0.1", "'2:0.1': both numbers must be from 0 to 1"),
        ("summary_quantiles=nan:0.1", "both numbers must be from 0 to 1"),
        ("summary_quantiles=0.5:0.1,0.5:0.2", "different quantiles"),
    ],
)
def test_mistakes_in_settings(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_metrics_config([text])


def test_nothing_is_kept_unless_asked_for() -> None:
    assert latency_observers(LatencySettings()) is None
    text = text_of(LatencySettings(), model())
    assert "nv_inference_request_duration_us" in text
    assert "summary" not in text
    assert "first_response" not in text


def test_summaries_have_triton_s_form() -> None:
    settings = LatencySettings(summaries=True, quantiles=(0.5, 0.99))
    watched = observed(settings, "metric_tags { key: 'team' value: 'search' }")
    cast(ModelLatencies, watched.statistics.observer).request(90_000, 20_000, 3_000, 60_000, 7_999)
    lines = text_of(settings, watched).splitlines()
    labels = '_team="search",model="m",version="1"'
    for name, value in (("request", 90), ("queue", 20), ("compute_input", 3), ("compute_infer", 60)):
        family = f"nv_inference_{name}_summary_us"
        first = lines.index(f"# TYPE {family} summary")
        assert lines[first + 1 : first + 5] == [
            f"{family}_count{{{labels}}} 1",
            f"{family}_sum{{{labels}}} {value}",
            f'{family}{{{labels},quantile="0.5"}} {value}',
            f'{family}{{{labels},quantile="0.99"}} {value}',
        ]
    assert f"nv_inference_compute_output_summary_us_sum{{{labels}}} 7" in lines
    assert f"nv_model_load_duration_secs{{{labels}}} 2.0" in lines
    assert "nv_cache_hit_summary_per_model" not in "\n".join(lines)


def test_models_with_a_response_cache_have_summaries_of_it() -> None:
    settings = LatencySettings(summaries=True, quantiles=(0.5,))
    watched = observed(settings, "response_cache { enable: true }")
    watched.statistics.answered_from_cache(4_000)
    watched.statistics.missed_by_cache(8_000)
    lines = text_of(settings, watched).splitlines()
    labels = 'model="m",version="1"'
    assert f"nv_cache_hit_summary_per_model_sum{{{labels}}} 4" in lines
    assert f"nv_cache_miss_summary_per_model_sum{{{labels}}} 8" in lines
    assert f"nv_inference_queue_summary_us_count{{{labels}}} 1" in lines
    assert f'nv_inference_compute_infer_summary_us{{{labels},quantile="0.5"}} NaN' in lines
    assert "# TYPE nv_inference_request_summary_us summary" not in lines


@pytest.mark.parametrize(("config", "bounds"), [("", ("100", "500", "2000", "5000")), (BUCKETS, ("1", "2.5"))])
def test_first_responses_of_decoupled_models(config: str, bounds: tuple[str, ...]) -> None:
    settings = LatencySettings(histograms=True)
    watched = observed(settings, "model_transaction_policy { decoupled: true } " + config)
    observer = cast(ModelLatencies, watched.statistics.observer)
    observer.first_response(2 * MS)
    observer.first_response(6000 * MS)
    family, labels = "nv_inference_first_response_histogram_ms", 'model="m",version="1"'
    lines = [line for line in text_of(settings, watched).splitlines() if line.startswith(family)]
    counts = {bound: int(bound != "1") for bound in bounds} | {"+Inf": 2}
    assert lines == [
        *(f'{family}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in counts.items()),
        f"{family}_count{{{labels}}} 2",
        f"{family}_sum{{{labels}}} 6002",
    ]


def test_other_models_have_no_histogram() -> None:
    settings = LatencySettings(histograms=True)
    watched = observed(settings, BUCKETS)
    cast(ModelLatencies, watched.statistics.observer).first_response(MS)
    assert "first_response" not in text_of(settings, watched)


def test_counters_of_latencies_can_be_left_out() -> None:
    text = text_of(LatencySettings(counters=False), model("response_cache { enable: true }"))
    assert "_duration_us" not in text
    assert "per_model" not in text
    assert 'nv_inference_request_success{model="m",version="1"} 0' in text
