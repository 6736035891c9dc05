from __future__ import annotations

import pytest

from penstock.loadtest.watch import increases, is_page, parse

PENSTOCK = """\
# HELP penstock_requests_running Requests in the running batch.
# TYPE penstock_requests_running gauge
penstock_requests_running{model="a"} 3.0
penstock_requests_running{model="b"} 4.0
# TYPE penstock_kv_cache_usage_ratio gauge
penstock_kv_cache_usage_ratio{model="a"} 0.25
penstock_kv_cache_usage_ratio{model="b"} 0.75
# TYPE penstock_generation_tokens_total counter
penstock_generation_tokens_total{model="a"} 1e3
penstock_generation_tokens_total{model="b"} 5
# TYPE penstock_queue_time_seconds histogram
penstock_queue_time_seconds_bucket{le="0.1",model="a"} 7
penstock_queue_time_seconds_bucket{le="+Inf",model="a"} 8
penstock_queue_time_seconds_count{model="a"} 8
penstock_queue_time_seconds_sum{model="a"} 1.5
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.24
# TYPE penstock_engine_ready gauge
penstock_engine_ready{model="a"} 1
"""
VLLM = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="org/m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/m"} 0.1
vllm:kv_cache_usage_perc{engine="1",model_name="org/m"} 0.4
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="length",model_name="org/m"} 9
# TYPE vllm:request_success_created gauge
vllm:request_success_created{finished_reason="length",model_name="org/m"} 1.7e9
"""
TRITON = """\
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="m",version="1"} 1500
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 6 1700000000000
nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 5 1700000000000
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-2"} 0.9
"""


def test_of_the_model_in_question() -> None:
    page = parse(PENSTOCK, "a")
    assert page.gauges == {"penstock_requests_running": 3, "penstock_kv_cache_usage_ratio": 0.25}
    assert page.counters == {
        "penstock_generation_tokens_total": 1000,
        "penstock_queue_time_seconds_count": 8,
        "penstock_queue_time_seconds_sum": 1.5,
    }


def test_of_all_models_where_the_page_does_not_know_it() -> None:
    page = parse(PENSTOCK, "public-name")
    assert page.gauges == {"penstock_requests_running": 7, "penstock_kv_cache_usage_ratio": 0.75}
    assert page.counters["penstock_generation_tokens_total"] == 1005


def test_vllms_and_tritons() -> None:
    page = parse(VLLM, "org/m")
    assert page.gauges == {"vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 0.4}
    assert page.counters == {"vllm:request_success_total": 9}
    page = parse(TRITON, "m")
    assert page.gauges == {
        "nv_trt_llm_request_metrics.waiting": 6,
        "nv_trt_llm_request_metrics.active": 5,
        "nv_gpu_utilization": 0.9,
    }
    assert page.counters == {"nv_inference_queue_duration_us": 1500}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "many"])
def test_what_is_no_number_is_left_out(value: str) -> None:
    assert parse(f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {value}\n").gauges == {}


def test_labels_with_braces_and_quotes() -> None:
    line = 'vllm:num_requests_running{model_name="a}\\"b",x="model=\\"c"} 2'
    assert parse(line, 'a}\\"b').gauges == {"vllm:num_requests_running": 2}


def test_what_is_a_page() -> None:
    assert is_page(PENSTOCK)
    assert not is_page("<html># TYPE of page</html>")
    assert not is_page('{"detail": "Not Found"}')


NEW = "# TYPE new_total counter\nnew_total 9\n# TYPE still_total counter\nstill_total 0\n"


def test_what_has_grown() -> None:
    before = parse(PENSTOCK, "a")
    after = parse(PENSTOCK.replace('_sum{model="a"} 1.5', '_sum{model="a"} 2.25').replace("1e3", "40") + NEW, "a")
    assert increases(before, after) == {
        "penstock_queue_time_seconds_sum": 0.75,
        "penstock_generation_tokens_total": 40,  # the server began again
        "new_total": 9,
    }
