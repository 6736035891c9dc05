"""What an engine counts, under the names that Prometheus scrapes."""

from __future__ import annotations

import pytest

from penstock.engines.contract.engine_stats import EngineStats, TierStats
from penstock.engines.contract.messages import StepRecord
from penstock.gateway.metrics.registry import Metrics
from penstock.gateway.models.language.model_metrics import ModelMetrics


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("num_running", "penstock_requests_running"),
        ("num_waiting", "penstock_requests_waiting"),
        ("num_waiting_tokens", "penstock_tokens_waiting"),
        ("num_blocks", "penstock_kv_cache_blocks"),
        ("num_free_blocks", "penstock_kv_cache_free_blocks"),
        ("num_cached_blocks", "penstock_kv_cache_cached_blocks"),
        ("num_state_rows", "penstock_recurrent_state_rows"),
        ("num_free_state_rows", "penstock_recurrent_state_free_rows"),
        ("admitted", "penstock_engine_admitted_total"),
        ("prompt_tokens", "penstock_prompt_tokens_total"),
        ("generation_tokens", "penstock_generation_tokens_total"),
        ("preemptions", "penstock_preemptions_total"),
        ("prefix_queries", "penstock_prefix_cache_queries_total"),
        ("prefix_hits", "penstock_prefix_cache_hits_total"),
        ("steps", "penstock_engine_steps_total"),
        ("step_failures", "penstock_engine_step_failures_total"),
        ("draft_tokens", "penstock_spec_decode_draft_tokens_total"),
        ("accepted_tokens", "penstock_spec_decode_accepted_tokens_total"),
        ("offload.blocks", "penstock_kv_offload_blocks"),
        ("offload.bytes", "penstock_kv_offload_bytes"),
        ("offload.saved", "penstock_kv_offload_saved_blocks_total"),
        ("offload.dropped", "penstock_kv_offload_dropped_blocks_total"),
        ("offload.loaded", "penstock_kv_offload_loaded_blocks_total"),
        ("offload.damaged", "penstock_kv_offload_damaged_blocks_total"),
        ("offload.waits", "penstock_kv_offload_waits_total"),
        ("offload.wait_seconds", "penstock_kv_offload_wait_seconds_total"),
    ],
)
def test_what_an_engine_counts_is_scraped(field: str, name: str) -> None:
    tier, _, name_there = field.rpartition(".")
    figures = {tier: TierStats(**{name_there: 7})} if tier else {field: 7}
    model = ModelMetrics("m", lambda: EngineStats(**figures), lambda: True)
    text, _ = Metrics(lambda: [model], list).render()
    assert f'\n{name}{{model="m"}} 7.0\n' in text.decode()


def test_steps_are_observed_one_by_one() -> None:
    model = ModelMetrics("m", EngineStats, lambda: True)
    model.step(StepRecord(0.03, 5, 70))
    text, _ = Metrics(lambda: [model], list).render()
    for name, total in (("duration_seconds", "0.03"), ("requests", "5.0"), ("tokens", "70.0")):
        assert f'penstock_step_{name}_sum{{model="m"}} {total}' in text.decode()
