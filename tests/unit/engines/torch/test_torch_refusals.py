"""What the runner cannot do is refused by name when a model is loaded; nothing is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.errors import ContextLengthError, EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.registry import EngineSpec, load_runner
from penstock.engines.torch.attention import ATTENTION
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.probe import inspect_layers, verify
from support.models import edit_config, make_model
from unit.engines.torch.families import make_family


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("bert", {}, "BertLMHeadModel cannot be run: it attends to later tokens"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM cannot be run: .* does not take position_ids"),
        ("diffllama", {}, "called attention 8 times, from 4 places|does not let its attention be replaced"),
        ("doge", {"head_dim": 16}, "DogeForCausalLM cannot be run: it brings a mask of its own"),
        ("falcon", {}, "falcon does not let its attention be replaced"),
        ("gpt_neox_japanese", {}, "GPTNeoXJapaneseForCausalLM cannot be run: it does not let its attention"),
        ("llama4_text", {"layer_types": ["chunked_attention"] * 4}, "layers of type chunked_attention"),
        ("mamba", {}, "MambaForCausalLM cannot be run: its forward does not take position_ids"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 24}, "its attention is not told of sliding_window"),
        ("rwkv", {"attention_hidden_size": 64}, "RwkvForCausalLM keeps state"),
    ],
)
def test_models_that_cannot_be_driven(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path, make_runner: Any
) -> None:
    make_family(tmp_path, family, **overrides)
    with pytest.raises(UnsupportedError, match=message):
        make_runner(tmp_path)


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "config.json has auto_map: .* never run"),
        ({"nested": [{"auto_map": {"AutoModel": "a/b--evil.Model"}}]}, "config.json has auto_map"),
        ({"_attn_implementation": "someone/kernels"}, "_attn_implementation='someone/kernels'"),
        ({"_attn_implementation_internal": "someone/kernels"}, "_attn_implementation_internal"),
        ({"_experts_implementation": "someone/kernels"}, "_experts_implementation"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints are not supported"),
        ({"text_config": {}}, "multimodal models are not supported"),
        ({"model_type": "unheard_of"}, "does not take this config.json"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "vit"}, "."),
        ({"rope_parameters": _DYNAMIC}, "RoPE type 'dynamic'"),
    ],
)
def test_settings_that_are_not_supported(
    changes: dict[str, Any], message: str, tmp_path: Path, make_runner: Any
) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=message):
        make_runner(tmp_path)


def test_the_long_context_of_longrope(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", rope_parameters=_LONG)
    assert make_runner(tmp_path).info.max_model_len == 128
    with pytest.raises(UnsupportedError, match=r"'longrope' changes .* beyond 128 tokens"):
        make_runner(tmp_path, max_model_len=129)


def test_longrope_within_its_short_range(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", rope_parameters=_LONG)
    assert make_runner(tmp_path, max_model_len=128).info.max_model_len == 128


def test_code_beside_the_weights_is_not_run(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit_config(tmp_path, model_type="unheard_of", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(UnsupportedError, match="auto_map"):
        make_runner(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickles_are_not_loaded(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"safetensors only; pytorch_model\.bin is a pickle"):
        make_runner(tmp_path)


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../model.safetensors"])
def test_an_index_names_only_safetensors_of_its_folder(shard: str, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    settings = json.loads(index.read_text())
    settings["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(settings))
    with pytest.raises(EngineError, match="no safetensors file of its folder"):
        make_runner(tmp_path)


def test_a_folder_with_an_adapter_is_no_model(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapters are loaded beside a model"):
        make_runner(tmp_path)


def test_tensors_that_are_missing_or_left_over(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    more = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "extra": torch.zeros(1)}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match="1 tensors that no part of the model uses: extra"):
        make_runner(tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks 1 tensors: model\.norm\.weight"):
        make_runner(tmp_path)


@pytest.mark.parametrize("damage", ["shape", "bytes"])
def test_checkpoints_that_are_broken(damage: str, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    if damage == "shape":
        edit_config(tmp_path, intermediate_size=97)
    else:
        (tmp_path / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(EngineError, match="cannot be loaded"):
        make_runner(tmp_path)


def test_a_model_that_mixes_neighbours_is_found_out(tmp_path: Path) -> None:
    """As a convolution over the flat tokens would."""
    from transformers import AutoModelForCausalLM

    from penstock.engines.torch.attention import register

    register()
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, "llama"), attn_implementation=ATTENTION)
    layouts, vocab_size = inspect_layers(model, 512)
    verify(model, layouts, vocab_size)
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x + 0.5 * x.roll(1, dims=1))
    with pytest.raises(UnsupportedError, match="in steps it computes something else than at once"):
        verify(model, layouts, vocab_size)
    model.lm_head.weight.data.zero_()  # nothing to compare, and nothing that differs
    verify(model, layouts, vocab_size)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"dtype": "f8"}, "dtype"),
        ({"kv_cache_dtype": "u8"}, "kv_cache_dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"threads": 0}, "threads"),
        ({"block_size": True}, "block_size"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_loras": -1}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"kv_cache_memory": "4 potatoes"}, None),
    ],
)
def test_options_that_make_no_sense(settings: dict[str, Any], param: str | None, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TorchConfig(tmp_path, **settings)
    assert caught.value.param == param


def test_options_that_do_not_go_with_the_model_or_the_machine(llama_dir: Path, make_runner: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"kv_cache_dtype=bf16 is not the computation's f32"):
        make_runner(llama_dir, kv_cache_dtype="bf16")
    with pytest.raises(ContextLengthError, match="max_model_len=513 is above the model's 512"):
        make_runner(llama_dir, max_model_len=513)
    with pytest.raises(UnsupportedError, match="does not hold one block"):
        make_runner(llama_dir, num_blocks=None, kv_cache_memory=100)
    with pytest.raises(UnsupportedError, match=r"device=cuda:99: torch .* sees \d+ CUDA devices"):
        make_runner(llama_dir, device="cuda:99")


def test_the_registry_takes_plain_options(llama_dir: Path) -> None:
    options = {"model_dir": str(llama_dir), "device": "cpu", "threads": 1, "kv_cache_memory": "1MiB"}
    runner = load_runner(EngineSpec(runner="torch", options=options))
    # 3 layers, keys and values, 2 heads of 16 f32: 768 bytes a token
    assert runner.info.num_blocks == (1 << 20) // (32 * 768)
    assert (runner.info.block_size, runner.info.eos_token_ids) == (32, (2,))
    assert runner.info.runner == "torch f32, cpu, 1 threads"
    runner.close()
