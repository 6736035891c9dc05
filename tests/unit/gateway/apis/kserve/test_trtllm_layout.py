"""Models of NVIDIA's LLM API layout: what their model.yaml and config.pbtxt become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.classic.model_config import ModelInstanceGroup
from penstock.engines.errors import UnsupportedError
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.kserve.trtllm_layout import TrtllmLayout
from penstock.gateway.models.repository.config_checks import check_supported
from support.language_repository import context, write_trtllm


def configured(
    folder: Path, arguments: dict[str, Any] | None = None, *, engine: str = "tensorrt_llm", **server: Any
) -> ModelSettings:
    version = write_trtllm(folder, "m", "org/model", arguments)
    return TrtllmLayout(engine).configure(load_config(server, environ={}).models, context(version))


def test_the_sample_runs_on_tensorrt_llm(tmp_path: Path) -> None:
    config = configured(tmp_path, scheduler="penstock", engine="tensorrt_llm")
    assert (config.model.engine, config.model.model) == ("tensorrt_llm", "org/model")
    assert (config.scheduling.scheduler, config.engine.engine_args) == ("auto", {})


def test_settings_that_we_have_are_ours_and_the_rest_is_the_engine_s(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        {
            "dtype": "float16",
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "max_batch_size": 32,
            "max_num_tokens": 4096,
            "max_seq_len": 8192,
            "kv_cache_config": {
                "enable_block_reuse": False,
                "free_gpu_memory_fraction": 0.7,
                "max_tokens": 6400,
                "tokens_per_block": 64,
                "host_cache_size": 1 << 30,
            },
            "enable_chunked_prefill": True,
            "moe_expert_parallel_size": 2,
        },
    )
    assert (config.model.dtype, config.model.max_model_len) == ("f16", 8192)
    assert (config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size) == (4, 2)
    assert (config.scheduling.max_num_seqs, config.scheduling.max_num_batched_tokens) == (32, 4096)
    assert (config.cache.prefix_caching, config.cache.num_kv_blocks) == (False, 100)
    assert config.engine.gpu_memory_utilization == 0.7
    assert config.engine.engine_args == {
        "kv_cache_config": {"tokens_per_block": 64, "host_cache_size": 1 << 30},
        "enable_chunked_prefill": True,
        "moe_expert_parallel_size": 2,
    }


def test_settings_of_our_scheduler_are_for_other_models(tmp_path: Path) -> None:
    server = load_config(
        {"speculative": "ngram", "steps_in_flight": 1, "scheduler": "penstock", "policy": "fair"}, environ={}
    )
    version = write_trtllm(tmp_path, "m", "org/model")
    found = TrtllmLayout().configure(server, context(version)).scheduling
    assert (found.scheduler, found.speculative, found.steps_in_flight, found.policy) == ("auto", "off", 2, "fair")


def test_what_triton_itself_is_told_is_so_anyway(tmp_path: Path) -> None:
    triton = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 50, "multimodal": False}
    assert configured(tmp_path, {"triton_config": triton}) == configured(tmp_path / "other")


def test_adapters_are_known_by_their_folders(tmp_path: Path) -> None:
    version = write_trtllm(
        tmp_path, "m", "org/model", {"lora_config": {"lora_dir": ["/far/sql", "near"], "max_lora_rank": 8}}
    )
    (version / "near").mkdir()
    adapters = TrtllmLayout().configure(ModelSettings(), context(version)).adapters
    assert adapters.lora == ("sql=/far/sql", f"near={version / 'near'}")
    assert (adapters.max_loras, adapters.max_lora_rank) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"backend": "tensorrt"}, "backend: only pytorch"),
        ({"tokenizer": "org/other"}, "tokenizer: it must be the model's own"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init: prompts"),
        ({"revision": "abc"}, "revision: this server fetches"),
        ({"logits_post_processors": {"json": "module:guard"}}, "logits_post_processors: they name code"),
        ({"triton_config": {"max_batch_size": 64}}, "triton_config: max_batch_size must be 0"),
        ({"triton_config": {"multimodal": True}}, "triton_config: multimodal must be False"),
        ({"triton_config": {"priority": 1}}, "triton_config: 'priority' is not one of"),
        ({"triton_config": 3}, "triton_config must be an object"),
        ({"lora_config": {"max_lora_rank": 8}}, "lora_dir must list"),
        ({"lora_config": {"lora_dir": ["/a"], "swap_gate": True}}, "lora_config: 'swap_gate'"),
        ({"kv_cache_config": {"max_tokens": 5}}, "kv_cache_config: max_tokens"),
        ({"kv_cache_config": []}, "kv_cache_config must be an object"),
        ({"max_seq_len": "long"}, "max_model_len"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configured(tmp_path, arguments)


def test_folders_of_engines_are_told_apart(tmp_path: Path) -> None:
    version = write_trtllm(tmp_path, "m", "engines")
    (version / "engines").mkdir()
    (version / "engines" / "rank0.engine").touch()
    with pytest.raises(ConfigError, match="a folder of TensorRT engines, which are not served"):
        TrtllmLayout().configure(ModelSettings(), context(version))


@pytest.mark.parametrize("name", ["gpt_model_type", "engine_dir", "batching_strategy"])
def test_the_in_flight_batcher_s_layout_is_named_before_its_fields(tmp_path: Path, name: str) -> None:
    extra = f'parameters {{ key: "{name}" value {{ string_value: "x" }} }} input {{ allow_ragged_batch: true }}'
    with pytest.raises(UnsupportedError, match=r"TensorRT engines \(inflight_batcher_llm\), which are not served"):
        check_supported(context(write_trtllm(tmp_path, "m", "org/model"), extra).config)


def test_one_instance_that_takes_the_gpus_itself(tmp_path: Path) -> None:
    given = context(write_trtllm(tmp_path, "m", "org/model"))
    given.config.instance_group[0].kind = ModelInstanceGroup.KIND_GPU
    with pytest.raises(ConfigError, match="KIND_MODEL"):
        TrtllmLayout().configure(ModelSettings(), given)
    given.config.instance_group[0].count = 2
    with pytest.raises(ConfigError, match="2 instances"):
        TrtllmLayout().configure(ModelSettings(), given)


@pytest.mark.parametrize(("content", "told"), [("[", "cannot be read as YAML"), ("- 1", "must hold an object")])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str, told: str) -> None:
    version = write_trtllm(tmp_path, "m", "org/model")
    (version / "model.yaml").write_text(content)
    with pytest.raises(ConfigError, match=told):
        TrtllmLayout().configure(ModelSettings(), context(version))
    (version / "model.yaml").unlink()
    with pytest.raises(ConfigError, match=r"'model\.yaml' containing TRT-LLM engine args not found"):
        TrtllmLayout().configure(ModelSettings(), context(version))


@pytest.mark.parametrize("engine", ["openvino", "simulated", "vllm"])
def test_another_engine_runs_the_sample_if_the_operator_says_so(tmp_path: Path, engine: str) -> None:
    config = configured(tmp_path, {"max_seq_len": 128}, engine=engine)
    assert (config.model.engine, config.model.max_model_len, config.engine) == (engine, 128, ModelSettings().engine)


def test_what_only_tensorrt_llm_knows_is_refused_for_another_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpus_per_node: only the tensorrt_llm engine .* engine=vllm"):
        configured(tmp_path, {"gpus_per_node": 4}, engine="vllm")
