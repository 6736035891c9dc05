"""Triton's vLLM models: what their model.json, multi_lora.json and config.pbtxt become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.classic.model_config import ModelInstanceGroup
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.kserve import folder_layout, vllm_layout
from penstock.gateway.models.language.kserve.vllm_layout import VllmLayout
from support.language_repository import context, write_vllm


def configured(
    folder: Path, arguments: dict[str, Any] | None = None, *, extra: str = "", engine: str = "vllm", **server: Any
) -> ModelSettings:
    version = write_vllm(folder, "m", "org/model", arguments)
    return VllmLayout(engine).configure(load_config(server, environ={}).models, context(version, extra))


def test_the_sample_runs_on_vllm(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert (config.model.engine, config.model.model) == ("vllm", "org/model")
    assert config.engine.gpu_memory_utilization == 0.5
    assert config.engine.engine_args == {"enforce_eager": True}


def test_settings_that_we_have_are_ours_and_the_rest_is_vllm_s(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        {
            "dtype": "bfloat16",
            "kv_cache_dtype": "float16",
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "quantization": "awq",
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 30,
            "num_gpu_blocks_override": 512,
            "scheduling_policy": "priority",
            "seed": None,
            "block_size": 32,
            "speculative_config": {"method": "ngram"},
        },
    )
    assert (config.model.dtype, config.model.kv_cache_dtype, config.model.max_model_len) == ("bf16", "f16", 4096)
    assert (config.scheduling.max_num_seqs, config.scheduling.max_num_batched_tokens) == (64, 2048)
    assert config.scheduling.policy == "priority"
    assert (config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size) == (2, 3)
    assert config.engine.quantization == "awq"
    assert (config.cache.prefix_caching, config.cache.kv_cache_memory, config.cache.num_kv_blocks) == (
        False,
        1 << 30,
        512,
    )
    assert config.engine.engine_args == {
        "enforce_eager": True,
        "block_size": 32,
        "speculative_config": {"method": "ngram"},
    }


def test_true_may_be_text_as_in_triton_s_tutorial(tmp_path: Path) -> None:
    config = configured(
        tmp_path, {"enforce_eager": "true", "disable_log_requests": "True", "trust_remote_code": "false"}
    )
    assert config.engine.engine_args == {"enforce_eager": True}


def test_what_concerns_vllm_s_own_front_has_no_effect(tmp_path: Path) -> None:
    arguments = {
        "max_log_len": 10,
        "served_model_name": "other",
        "skip_tokenizer_init": False,
        "tokenizer_mode": "auto",
    }
    assert configured(tmp_path, arguments) == configured(tmp_path / "other")


def test_the_command_line_s_model_and_engine_are_not_this_model_s(tmp_path: Path) -> None:
    own = {"engine": "openvino", "weights": "int8", "max_model_len": 99, "lora": ["a=/b"], "quantization": "gptq"}
    general = {"scheduler": "engine", "kv_cache_memory": "1GiB", "max_queued_requests": 7}
    server = load_config(own | general, environ={})
    config = VllmLayout().configure(server, context(write_vllm(tmp_path, "m", "org/model")))
    assert (config.model.engine, config.model.weights, config.model.max_model_len) == ("vllm", "auto", None)
    assert (config.adapters.lora, config.engine.quantization) == ((), None)
    assert (config.scheduling.scheduler, config.scheduling.max_queued_requests) == ("engine", 7)
    assert config.cache.kv_cache_memory == "1GiB"


def test_guesses_of_our_scheduler_are_for_other_models(tmp_path: Path) -> None:
    server = {"speculative": "ngram", "max_draft_tokens": 4, "itl_target_ms": 100}
    found = configured(tmp_path, **server).scheduling
    assert (found.speculative, found.max_draft_tokens, found.itl_target_ms) == ("off", 8, 100)
    found = configured(tmp_path / "other", engine="openvino", **server).scheduling
    assert (found.speculative, found.max_draft_tokens) == ("ngram", 4)


def test_evicted_blocks_are_kept_where_the_engine_can(tmp_path: Path) -> None:
    server = {"kv_offload_dir": "/kv", "kv_offload_bytes": 1 << 30}
    found = configured(tmp_path, **server).cache
    assert (found.kv_offload_dir, found.kv_offload_bytes) == (None, 10 << 30)
    found = configured(tmp_path / "other", engine="openvino", **server).cache
    assert (found.kv_offload_dir, found.kv_offload_bytes) == ("/kv", 1 << 30)
    found = configured(tmp_path / "none", {"enable_prefix_caching": False}, engine="openvino", **server).cache
    assert found.kv_offload_dir is None


def test_models_and_tokenizers_may_lie_beside_their_settings(tmp_path: Path) -> None:
    version = write_vllm(tmp_path, "m", "weights", {"tokenizer": "weights"})
    (version / "weights").mkdir()
    config = VllmLayout().configure(ModelSettings(), context(version))
    assert config.model.model == str(version / "weights")


def test_adapters_come_from_multi_lora_json(tmp_path: Path) -> None:
    version = write_vllm(tmp_path, "m", "org/model", {"enable_lora": "true", "max_lora_rank": 32})
    (version / "near").mkdir()
    (version / "multi_lora.json").write_text(json.dumps({"alpaca": "/far/away", "sql": "near"}))
    adapters = VllmLayout().configure(ModelSettings(), context(version)).adapters
    assert adapters.lora == ("alpaca=/far/away", f"sql={version / 'near'}")
    assert (adapters.max_loras, adapters.max_lora_rank) == (2, 32)


def test_more_adapters_can_be_loaded_where_vllm_would_keep_them_in_memory(tmp_path: Path) -> None:
    version = write_vllm(tmp_path, "m", "org/model", {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 5})
    (version / "multi_lora.json").write_text('{"a": "/b"}')
    assert VllmLayout().configure(ModelSettings(), context(version)).adapters.max_loras == 5


def test_without_enable_lora_there_are_no_adapters_as_in_triton(tmp_path: Path) -> None:
    version = write_vllm(tmp_path, "m", "org/model", {"max_loras": 4})
    (version / "multi_lora.json").write_text('{"a": "/b"}')
    config = VllmLayout().configure(ModelSettings(), context(version))
    assert config.adapters == ModelSettings().adapters
    assert config.engine.engine_args == {"enforce_eager": True}


@pytest.mark.parametrize(
    "text",
    ["KIND_MODEL", "KIND_CPU"],
)
def test_metrics_health_and_inputs_are_as_asked_anyway(tmp_path: Path, text: str) -> None:
    extra = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in (
            ("REPORT_CUSTOM_METRICS", "true"),
            ("ENABLE_VLLM_HEALTH_CHECK", "true"),
            ("FORCE_CPU_ONLY_INPUT_TENSORS", "no"),
        )
    )
    version = write_vllm(tmp_path, "m", "org/model")
    given = context(version, extra)
    given.config.instance_group[0].kind = ModelInstanceGroup.Kind.Value(text)
    assert VllmLayout().configure(ModelSettings(), given).engine.engine_args == {"enforce_eager": True}


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def test_gpu_device_ids_are_vllm_s_devices(tmp_path: Path) -> None:
    config = configured(tmp_path, {"tensor_parallel_size": 2}, extra=parameter("GPU_DEVICE_IDS", "1, 3"))
    assert config.engine.engine_args == {"enforce_eager": True, "device_ids": [1, 3]}


def test_kind_gpu_means_that_gpu(tmp_path: Path) -> None:
    given = context(write_vllm(tmp_path, "m", "org/model"))
    given.config.instance_group[0].kind = ModelInstanceGroup.KIND_GPU
    given.config.instance_group[0].gpus.append(1)
    assert VllmLayout().configure(ModelSettings(), given).engine.engine_args["device_ids"] == [1]  # type: ignore[index]


def test_kind_gpu_is_for_one_gpu(tmp_path: Path) -> None:
    given = context(write_vllm(tmp_path, "m", "org/model", {"tensor_parallel_size": 2}))
    given.config.instance_group[0].kind = ModelInstanceGroup.KIND_GPU
    with pytest.raises(ConfigError, match="KIND_GPU is currently for single-GPU models, please specify KIND_MODEL"):
        VllmLayout().configure(ModelSettings(), given)


@pytest.mark.parametrize("gpus", [[], [0, 1]])
def test_a_model_is_one_instance(tmp_path: Path, gpus: list[int]) -> None:
    given = context(write_vllm(tmp_path, "m", "org/model"))
    group = given.config.instance_group[0]
    group.gpus.extend(gpus)
    group.count = 1 if gpus else 2
    with pytest.raises(ConfigError, match="instance_group: 2 instances"):
        VllmLayout().configure(ModelSettings(), given)


@pytest.mark.parametrize(
    ("arguments", "extra", "told"),
    [
        ({"tokenizer": "org/other"}, "", "tokenizer: it must be the model's own"),
        ({"tokenizer_mode": "slow"}, "", None),
        ({"revision": "abc"}, "", "revision: this server fetches hub models itself"),
        ({"download_dir": "/tmp"}, "", "download_dir: this server"),
        ({"dtype": "float8"}, "", "dtype: 'float8' is none of"),
        ({"kv_cache_dtype": "nvfp4"}, "", "kv_cache_dtype: 'nvfp4'"),
        ({"max_num_seqs": 0}, "", "max_num_seqs"),
        ({"gpu_memory_utilization": 2}, "", "gpu_memory_utilization"),
        ({"model": 3}, "", "'model' must be a text"),
        ({"enable_lora": True}, "", "Triton backend cannot find multi_lora.json"),
        ({}, parameter("EXECUTION_ENV_PATH", "/env.tar.gz"), "parameters: 'EXECUTION_ENV_PATH' is not one of"),
        ({}, parameter("GPU_DEVICE_IDS", "a"), "GPU_DEVICE_IDS: 'a' is not"),
        ({}, parameter("GPU_DEVICE_IDS", "1,1"), "GPU_DEVICE_IDS: '1,1' has"),
        ({"tensor_parallel_size": 2}, parameter("GPU_DEVICE_IDS", "1"), "GPU_DEVICE_IDS: 1 of them"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, arguments: dict[str, Any], extra: str, told: str | None) -> None:
    if told is None:  # for the engine to say, which knows its release
        assert "tokenizer_mode" in configured(tmp_path, arguments, extra=extra).engine.engine_args
        return
    with pytest.raises(ConfigError, match=told):
        configured(tmp_path, arguments, extra=extra)


@pytest.mark.parametrize(("content", "told"), [("{", "cannot be read as JSON"), ("[]", "must hold an object")])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str, told: str) -> None:
    version = write_vllm(tmp_path, "m", "org/model")
    (version / "model.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        VllmLayout().configure(ModelSettings(), context(version))


def test_model_json_must_be_there(tmp_path: Path) -> None:
    version = write_vllm(tmp_path, "m", "org/model")
    (version / "model.json").unlink()
    with pytest.raises(ConfigError, match=r"'model\.json' containing vllm engine args must be provided"):
        VllmLayout().configure(ModelSettings(), context(version))


@pytest.mark.parametrize("engine", ["openvino", "simulated", "torch"])
def test_another_engine_runs_the_sample_if_the_operator_says_so(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_layout, "visible_gpus", lambda: 0)
    config = configured(tmp_path, {"max_model_len": 128}, engine=engine)
    assert (config.model.engine, config.model.max_model_len) == (engine, 128)
    assert config.engine == ModelSettings().engine


def test_what_only_vllm_knows_is_refused_for_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"block_size: only the vllm engine .* engine=openvino"):
        configured(tmp_path / "a", {"block_size": 32}, engine="openvino")
    monkeypatch.setattr(vllm_layout, "visible_gpus", lambda: 1)
    assert configured(tmp_path / "b", engine="torch").engine.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(("installed", "engine"), [(True, "vllm"), (False, "auto")])
def test_auto_is_vllm_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, engine: str
) -> None:
    monkeypatch.setattr(folder_layout, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(vllm_layout, "visible_gpus", lambda: 0)
    assert configured(tmp_path, engine="auto").model.engine == engine


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_layout, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package vllm, .*penstock-server\[vllm\]"):
        folder_layout.check_installed("vllm")
    with pytest.raises(ConfigError, match=r"needs the package tensorrt_llm, .*penstock-server\[tensorrt-llm\]"):
        folder_layout.check_installed("tensorrt_llm")
    folder_layout.check_installed("openvino")
