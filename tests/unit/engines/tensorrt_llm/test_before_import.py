"""What is decided before TensorRT-LLM is imported; none of this needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.tensorrt_llm.arguments import check_engine_args, llm_arguments
from penstock.engines.tensorrt_llm.config import check_settings, read_checkpoint, read_config
from penstock.engines.tensorrt_llm.loading import installed_version
from unit.engines.tensorrt_llm.conftest import write_model

KNOWN = {"sampler_type", "kv_cache_config", "stream_interval", "moe_config"}
KNOWN_OF_CACHE = {"tokens_per_block", "host_cache_size"}


def version(text):
    def version_of(name):
        assert name == "tensorrt-llm"
        if text is None:
            raise PackageNotFoundError(name)
        return text

    return version_of


@pytest.mark.parametrize("text", ["1.2.0", "1.2.1", "1.2.9.post1"])
def test_versions_that_are_known(text):
    assert installed_version(version(text)) == text


@pytest.mark.parametrize("text", ["1.1.0", "1.3.0rc24", "0.21.0", "2.0", "dev"])
def test_other_versions_are_refused_by_name(text):
    with pytest.raises(EngineError, match=rf"tensorrt-llm {text} is installed, .* 1\.2 or newer and older than 1\.3"):
        installed_version(version(text))


def test_no_tensorrt_llm_at_all():
    with pytest.raises(EngineError, match=r"penstock-server\[tensorrt-llm\]"):
        installed_version(version(None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"speculative": "ngram"}, "speculative"),
        ({"kv_cache_memory": "a lot"}, "'a lot' is not an amount of memory"),
        ({"kv_cache_memory": "40%"}, "gpu_memory_utilization"),
    ],
)
def test_options_that_are_not_offered(tmp_path, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        read_config({"model_dir": str(tmp_path)} | options)


def read(folder, **options):
    config = read_config({"model_dir": str(folder)} | options)
    checkpoint = read_checkpoint(config)
    check_settings(config, checkpoint)
    return config, checkpoint


def test_what_the_checkpoint_says(tmp_path):
    write_model(tmp_path, eos_token_id=[2, 7], dtype="float16")
    _, checkpoint = read(tmp_path, dtype="f16", kv_cache_dtype="f16")
    assert (checkpoint.vocab_size, checkpoint.max_model_len, checkpoint.eos_token_ids) == (384, 512, (2, 7))
    assert (checkpoint.precision, checkpoint.quantization) == ("f16", "")
    assert read(tmp_path, max_model_len=100)[1].max_model_len == 100


def test_settings_of_a_multimodal_model_are_those_of_its_text(tmp_path):
    inside = {"vocab_size": 5, "max_position_embeddings": 6, "torch_dtype": "bfloat16", "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inside}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    _, checkpoint = read(tmp_path)
    assert (checkpoint.vocab_size, checkpoint.max_model_len, checkpoint.precision) == (5, 6, "bf16")


def test_quantization_is_what_the_checkpoint_has(tmp_path):
    write_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert read(tmp_path, quantization="fp8")[1].quantization == "fp8"
    with pytest.raises(UnsupportedError, match=r"quantization=awq: .*this one has fp8"):
        read(tmp_path, quantization="awq")
    write_model(tmp_path / "other", quantization_config={"quant_method": "gptq"})
    assert read(tmp_path / "other", quantization="GPTQ")[1].quantization == "gptq"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f32"}, "dtype=f32: .*checkpoint's precision, bf16"),
        ({"kv_cache_dtype": "u8"}, "kv_cache_dtype=u8: .*fp8 or bf16"),
        ({"threads": 4}, "threads=4: .*GPU"),
        ({"quantization": "fp8"}, "this one has no quantization"),
    ],
)
def test_settings_that_would_not_be_heeded(tmp_path, options, message):
    with pytest.raises(UnsupportedError, match=message):
        read(write_model(tmp_path), **options)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        read(tmp_path)
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no safetensors"):
        read(tmp_path)
    write_model(tmp_path, max_position_embeddings=None)
    with pytest.raises(InvalidRequestError, match="max_model_len must be given"):
        read(tmp_path)


def test_the_cache_by_memory_by_blocks_and_by_share(tmp_path):
    write_model(tmp_path)
    assert llm_arguments(*read(tmp_path, memory_share=0.5))["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.5,
        "enable_block_reuse": True,
    }
    cache = llm_arguments(*read(tmp_path, kv_cache_memory="2GiB"))["kv_cache_config"]
    assert cache["max_gpu_total_bytes"] == 2 << 30
    args = {"kv_cache_config": {"tokens_per_block": 64, "host_cache_size": 7}}
    cache = llm_arguments(*read(tmp_path, num_blocks=10, kv_cache_memory="1GiB", engine_args=args))["kv_cache_config"]
    assert (cache["max_tokens"], cache["tokens_per_block"], cache["host_cache_size"]) == (640, 64, 7)
    assert "max_gpu_total_bytes" not in cache


def test_arguments_of_its_own_are_passed_on(tmp_path):
    args = {"sampler_type": "TRTLLMSampler", "enable_chunked_prefill": False}
    arguments = llm_arguments(*read(write_model(tmp_path), engine_args=args))
    assert arguments["sampler_type"] == "TRTLLMSampler"
    assert arguments["enable_chunked_prefill"] is False


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_batch_size": 3}, InvalidRequestError, "max_batch_size is Penstock's setting max_num_seqs"),
        ({"samplr_type": "auto"}, InvalidRequestError, "no argument samplr_type; did you mean sampler_type?"),
        (
            {"kv_cache_config": {"max_tokens": 3}},
            InvalidRequestError,
            r"kv_cache_config\.max_tokens is .*num_kv_blocks",
        ),
        ({"kv_cache_config": {"host_cach_size": 3}}, InvalidRequestError, "did you mean host_cache_size"),
        ({"kv_cache_config": 3}, InvalidRequestError, "kv_cache_config is not an object"),
        ({"max_beam_width": 2}, UnsupportedError, "max_beam_width is not possible here: a request is one sequence"),
        ({"trust_remote_code": True}, UnsupportedError, "never runs code"),
    ],
)
def test_arguments_that_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        check_engine_args(given, KNOWN, KNOWN_OF_CACHE)


def test_arguments_that_are_known():
    check_engine_args(
        {"moe_config": {"backend": "x"}, "kv_cache_config": {"host_cache_size": 1}}, KNOWN, KNOWN_OF_CACHE
    )


def test_it_is_registered_and_costs_nothing_until_it_is_asked_for():
    code = (
        "import sys, penstock.engines.registry as r; print('tensorrt_llm' in r.BATCHERS, 'tensorrt_llm' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]


def test_loading_without_it_says_how_to_get_it(tmp_path, monkeypatch):
    from penstock.engines.registry import EngineSpec, load_core

    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    spec = EngineSpec(runner="tensorrt_llm", options={"model_dir": str(write_model(tmp_path))})
    with pytest.raises(EngineError, match="TensorRT-LLM is not installed"):
        load_core(spec, lambda: 0.0)
