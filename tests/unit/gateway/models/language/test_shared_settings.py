"""Settings of MODEL that the models beside it share, by kind: of repositories, and of --embedding-model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.configuration.config import ConfigError, load_config, sections
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.types import Beside
from penstock.gateway.models.language.shared_settings import settings_beside

ALL: dict[str, Any] = {
    # of MODEL alone
    "model": "org/model",
    "revision": "v1",
    "served_model_name": ("chat",),
    "speculative_model": "org/draft",
    "replicas": 2,
    "resume": "on",
    "engine_door": "ipc:///tmp/p/door",
    "lora": ("a=/a",),
    "lora_directory": "/a",
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "kv_events_topic": "kv",
    # of models that are run as it is
    "engine": "openvino",
    "device": "cpu",
    "weights": "int8",
    "max_model_len": 99,
    "tool_parser": "none",
    "tensor_parallel_size": 2,
    "max_lora_rank": 64,
    "dtype": "f32",
    "kv_cache_dtype": "u8",
    "threads": 3,
    # of all
    "kv_cache_memory": "1GiB",
    "kv_offload_dir": "/kv",
    "max_num_seqs": 7,
    "policy": "fair",
    "sim_step_ms": 2.0,
    "speculative": "ngram",
    "max_draft_tokens": 3,
    "scheduler": "penstock",
}
OF_MODEL = set(ALL) & set(list(ALL)[:12])


def changed(settings: ModelSettings) -> set[str]:
    """Names of the settings that are not the defaults."""
    usual = sections(ModelSettings())
    return {
        name
        for section, values in sections(settings).items()
        for name, value in values.items()
        if value != usual[section][name]
    }


def beside(kind: Beside, own: dict[str, Any], **server: Any) -> ModelSettings:
    return settings_beside(load_config(server, environ={}).models, kind, own)


def test_models_with_our_settings_share_all_that_is_not_the_model_s_alone() -> None:
    assert changed(beside("penstock", {"scheduler": "penstock"}, **ALL)) == ALL.keys() - OF_MODEL


def test_models_with_another_server_s_settings_share_machine_cache_and_scheduling() -> None:
    shared = {"threads", "kv_cache_memory", "kv_offload_dir", "max_num_seqs", "policy", "sim_step_ms", "scheduler"}
    assert changed(beside("foreign", {}, **ALL)) == shared | {"speculative", "max_draft_tokens"}


def test_embedding_models_share_what_encoders_and_pooling_decoders_have() -> None:
    shared = {"dtype", "kv_cache_dtype", "kv_cache_memory", "kv_offload_dir", "max_num_seqs", "policy", "sim_step_ms"}
    assert changed(beside("embedding", {}, **ALL)) == shared
    own = beside("embedding", {"model": "folder", "weights": "int4"}, **ALL)
    assert (own.model.model, own.model.weights, own.model.dtype) == ("folder", "int4", "f32")


@pytest.mark.parametrize(
    ("own", "server"),
    [
        ({"engine": "openvino"}, {"engine": "vllm", "scheduler": "engine"}),
        ({"engine": "tensorrt_llm"}, {"scheduler": "penstock"}),
        ({"engine": "tensorrt_llm"}, {"speculative": "ngram", "itl_target_ms": 9.0, "steps_in_flight": 1}),
        ({"scheduler": "engine", "engine": "vllm"}, {"itl_target_ms": 9.0, "kv_offload_dir": "/kv"}),
        ({"engine": "vllm"}, {"speculative": "ngram", "max_draft_tokens": 3}),
        ({}, {"speculative": "mtp", "max_draft_tokens": 3}),
        ({}, {"speculative_model": "org/draft", "max_draft_tokens": 3}),
        ({"prefix_caching": False}, {"kv_offload_dir": "/kv", "kv_offload_bytes": 1 << 20}),
        ({"engine_address": "ipc:///tmp/p/door"}, {"engine": "simulated", "max_num_seqs": 9, "threads": 1}),
        ({"replicas": "0", "replica_address": ["ipc:///tmp/p/door"]}, {"max_num_seqs": 9, "kv_cache_memory": "1GiB"}),
    ],
)
def test_what_the_model_s_engine_would_refuse_is_not_shared(own: dict[str, Any], server: dict[str, Any]) -> None:
    assert changed(beside("penstock", own, **server)) == own.keys()


@pytest.mark.parametrize(
    "own",
    [
        {"engine": "torch", "kv_offload_dir": "/own"},
        {"engine": "openvino", "scheduler": "engine"},
        {"engine": "vllm", "speculative": "ngram", "max_draft_tokens": 3},
        {"engine": "tensorrt_llm", "itl_target_ms": 9.0},
    ],
)
def test_a_model_s_own_setting_stays_and_is_refused_where_the_engine_is_chosen(own: dict[str, Any]) -> None:
    assert changed(beside("penstock", own)) == own.keys()


def test_an_own_setting_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=0: "):
        beside("penstock", {"max_num_seqs": 0})
    with pytest.raises(ConfigError, match="there is no setting called 'http_port'"):
        beside("penstock", {"http_port": 1})
