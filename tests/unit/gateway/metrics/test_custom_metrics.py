"""Metrics of models and of Triton's users, as Prometheus reads them."""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.metrics.custom import MAX_METRICS, CustomMetrics
from penstock.gateway.metrics.prometheus_text import Family, render


def parsed(text: bytes) -> dict[str, float]:
    """prometheus-client's parser adds `_total` to counters."""
    return {
        sample.name.removesuffix("_total") + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_names_stay_as_they_are() -> None:
    family = Family("nv_inference_count", "counter", "text\nwith lines")
    family.add({"model": 'a"b\\c\nd', "version": "1"}, 3)
    text = render([family]).decode()
    assert text.splitlines() == [
        r"# HELP nv_inference_count text\nwith lines",
        "# TYPE nv_inference_count counter",
        r'nv_inference_count{model="a\"b\\c\nd",version="1"} 3',
    ]


def test_large_counts_keep_their_digits() -> None:
    family = Family("c", "counter", "")
    family.add({}, 12345678901234)
    assert parsed(render([family])) == {"c[]": 12345678901234}


def test_counters_and_gauges() -> None:
    metrics = CustomMetrics()
    requests = metrics.metric("COUNTER", "requests_seen", "Seen.", {"model": "m"})
    requests.increment(2)
    requests.increment(0.5)
    level = metrics.metric("GAUGE", "level", "Level.", {})
    level.set(7)
    level.increment(-3)
    assert (requests.value(), level.value()) == (2.5, 4)
    assert parsed(render(metrics.families())) == {"requests_seen[('model', 'm')]": 2.5, "level[]": 4}


def test_histograms_are_cumulative() -> None:
    histogram = CustomMetrics()
    metric = histogram.metric("HISTOGRAM", "sizes", "Sizes.", {}, [1, 10])
    for value in (0.5, 1, 3, 100):
        metric.observe(value)
    assert parsed(render(histogram.families())) == {
        "sizes_bucket[('le', '1')]": 2,
        "sizes_bucket[('le', '10')]": 3,
        "sizes_bucket[('le', '+Inf')]": 4,
        "sizes_count[]": 4,
        "sizes_sum[]": 104.5,
    }


def test_the_same_name_and_labels_are_the_same_metric() -> None:
    metrics = CustomMetrics()
    first = metrics.metric("COUNTER", "c", "C.", {"a": "1", "b": "2"})
    assert metrics.metric("COUNTER", "c", "C.", {"b": "2", "a": "1"}) is first
    assert metrics.metric("COUNTER", "c", "C.", {"a": "2", "b": "2"}) is not first


def test_a_family_is_known_before_its_first_metric_and_shown_with_it() -> None:
    """As in Triton: its kind and its first description hold."""
    metrics = CustomMetrics()
    metrics.family("COUNTER", "c", "First.")
    metrics.family("COUNTER", "c", "Second.")
    with pytest.raises(ValueError, match="the metric 'c' is a COUNTER"):
        metrics.family("GAUGE", "c", "First.")
    with pytest.raises(ValueError, match="cannot be the name"):
        metrics.family("GAUGE", "nv_inference_count", "")
    assert render(metrics.families()) == b""
    metrics.metric("COUNTER", "c", "Third.", {"z": "1", "a": "2"}).increment(2.0)
    assert render(metrics.families()).decode().splitlines() == [
        "# HELP c First.",
        "# TYPE c counter",
        'c{a="2",z="1"} 2',
    ]


def test_a_histogram_without_buckets_has_one_of_all_values() -> None:
    metrics = CustomMetrics()
    for value in (0.5, 3):
        metrics.metric("HISTOGRAM", "h", "", {}, []).observe(value)
    assert parsed(render(metrics.families())) == {"h_bucket[('le', '+Inf')]": 2, "h_count[]": 2, "h_sum[]": 3.5}


@pytest.mark.parametrize(
    ("kind", "name", "labels", "buckets"),
    [
        ("SUMMARY", "x", {}, ()),
        ("COUNTER", "taken", {}, ()),
        ("COUNTER", "two words", {}, ()),
        ("COUNTER", "nv_inference_count", {}, ()),
        ("COUNTER", "penstock_engine_ready", {}, ()),
        ("COUNTER", "x", {"not a word": "1"}, ()),
        ("COUNTER", "x", {"gpu": 0}, ()),
        ("COUNTER", 7, {}, ()),
        ("COUNTER", "x", {}, (1,)),
        ("HISTOGRAM", "x", {}, (2, 1)),
        ("GAUGE", "x", {}, (1,)),
    ],
)
def test_impossible_metrics_are_refused(kind: str, name: str, labels: dict[str, str], buckets: tuple[float]) -> None:
    metrics = CustomMetrics()
    metrics.metric("GAUGE", "taken", "", {})
    with pytest.raises(ValueError, match=r"."):
        metrics.metric(kind, name, "", labels, buckets)


def test_descriptions_are_text() -> None:
    metrics, nothing = CustomMetrics(), cast("str", None)
    with pytest.raises(ValueError, match="must be text"):
        metrics.metric("COUNTER", "x", nothing, {})
    assert render(metrics.families()) == b""


def test_verbs_that_do_not_fit_the_kind_are_refused() -> None:
    metrics = CustomMetrics()
    counter = metrics.metric("COUNTER", "c", "", {})
    gauge = metrics.metric("GAUGE", "g", "", {})
    histogram = metrics.metric("HISTOGRAM", "h", "", {}, [1])
    for wrong in (
        lambda: counter.increment(-1),
        lambda: counter.increment(float("nan")),
        lambda: counter.set(1),
        lambda: counter.observe(1),
        lambda: gauge.observe(1),
        lambda: histogram.increment(1),
        lambda: histogram.set(1),
        histogram.value,
    ):
        with pytest.raises(ValueError, match=r"HISTOGRAM|COUNTER|GAUGE"):
            wrong()


def test_their_number_is_bounded() -> None:
    metrics = CustomMetrics()
    for number in range(MAX_METRICS):
        metrics.metric("COUNTER", "c", "", {"request": str(number)})
    with pytest.raises(ValueError, match=str(MAX_METRICS)):
        metrics.metric("COUNTER", "c", "", {"request": "one more"})
    for name in ("d", "e"):
        with pytest.raises(ValueError, match=str(MAX_METRICS)):
            metrics.metric("COUNTER", name, "", {})
    assert [family.name for family in metrics.families()] == ["c"]
    for number in range(1, MAX_METRICS):
        metrics.family("GAUGE", f"g{number}", "")
    with pytest.raises(ValueError, match=str(MAX_METRICS)):
        metrics.family("GAUGE", "one_more", "")
    metrics.family("GAUGE", "g1", "")
