"""Models in GGUF files say, in f32, the very tokens that transformers says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.architectures import ARCHITECTURES
from penstock.engines.formats.gguf.container import StoredBlocks
from penstock.engines.formats.gguf.tensors import named_tensors
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.weights import checkpoint_key
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language.models import unpack
from support.cpu import own_cache
from support.gguf import round_weights, write_gguf
from support.models import edit_config, load_reference, make_model, reference_answers
from support.runner import Driver, prompt

COUNT = 30
PROMPTS = [prompt(length, length) for length in (1, 7, 33, 70)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))


def check(
    model: Path,
    file: Path,
    make_runner: Any,
    prompts: list[list[int]] = PROMPTS,
    count: int = COUNT,
    weights: str = "f32",
) -> None:
    reference = load_reference(model)
    found = Driver(make_runner(unpack(file), weights=weights)).generate(prompts, count)
    assert len({tuple(tokens) for tokens in found}) == len(found), "the model says the same whatever the prompt"
    assert found == reference_answers(reference, prompts, count, found)


@pytest.mark.parametrize("family", ["llama", "llama-llama3", "llama-linear", "llama-yarn", "qwen2", "qwen3", "gemma3"])
def test_files_of_every_family_answer_like_the_model_they_were_made_of(
    family: str, tmp_path: Path, make_runner: Any
) -> None:
    scale = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}  # the file does not say it
    model = make_model(tmp_path / "model", family, **scale)
    check(model, write_gguf(model, tmp_path / "x.gguf"), make_runner)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 9.0, 20.0],
}
MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 4,
    "moe_layers": [1, 3],
    "interleave_moe_layer_step": 2,
    "floor_scale": 8192,
    "attention_chunk_size": 8192,
    "intermediate_size_mlp": 80,
}
WITHOUT_CHUNKS = {"attention_chunk_size": None, "no_rope_layers": [1] * 4, "attn_temperature_tuning": False}
LONG = {"rope_parameters": LONGROPE, "max_position_embeddings": 512, "original_max_position_embeddings": 128}


@pytest.mark.families(
    "granite",
    "gemma2",
    "phi3",
    "qwen3-moe",
    "gpt-oss",
    "lfm2",
    "qwen3.5",
    "falcon",
    "gpt2",
    "minimax-m2",
    "ernie4.5-moe",
    "gemma3n",
    "falcon-h1",
)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
        ("olmo2", {}),
        ("olmo3", {}),
        ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
        ("exaone4", {}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("phi3", {"sliding_window": 24}),
        ("phi3", LONG),
        ("mixtral", {}),
        ("qwen2-moe", {"mlp_only_layers": []}),
        ("qwen3-moe", {}),
        ("olmoe", {}),
        ("gpt-oss", {"swiglu_limit": 7.0}),
        ("ministral3", {"rope_parameters": MINISTRAL3}),
        ("glm4", {}),
        ("glm4-moe", {}),
        ("dots1", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3, "routed_scaling_factor": 1.5}),
        ("minimax-m2", {}),
        ("afmoe", {"route_scale": 1.5}),
        ("ernie4.5", {"use_bias": True}),
        ("ernie4.5-moe", {"moe_layer_interval": 1}),
        ("hunyuan", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        ("seed-oss", {"attention_out_bias": True}),
        ("cohere", {}),
        ("cohere2", {}),
        ("granite-moe", {}),
        ("granite-moe-shared", {}),
        ("nemotron", {}),
        ("arcee", {}),
        ("gemma", {}),
        ("olmo", {"clip_qkv": 0.5}),
        ("phi-moe", {"lm_head_bias": True, "router_jitter_noise": 0.01}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}),
        ("lfm2-moe", {}),
        ("qwen3.5", {}),
        ("qwen3.5-moe", {"layer_types": None, "num_hidden_layers": 4}),
        ("gemma4", {}),
        ("gemma4", {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}),
        ("gemma3n", {"vocab_size_per_layer_input": 384}),
        ("falcon-h1", {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False}),
        ("nemotron-h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}),
        ("nemotron-h", {"layers_block_type": ["moe", "linear_attention", "full_attention"], "moe_latent_size": 24}),
        ("llama4", LLAMA4),
        (
            "llama4",
            LLAMA4 | {"attention_chunk_size": None, "no_rope_layers": [1] * 4, "attn_temperature_tuning": False},
        ),
        ("hunyuan-moe", {}),
        ("hy-v3", {}),
        ("exaone-moe", {}),
        ("cohere2-moe", {}),
        ("solar-open", {"first_k_dense_replace": 0}),
        ("mellum", {"mlp_layer_types": ["sparse"] * 3}),
        ("minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
        ("glm", {}),
        ("jais2", {}),
        ("apertus", {}),
        ("granite-swa", {"layer_rope_theta": [1e4, 0, 1e4]}),
        ("gpt-bigcode", {}),
        ("qwen3-next", {"layer_types": None, "num_hidden_layers": 4}),
        ("granite-hybrid", {}),
        ("granite-hybrid", {"num_local_experts": 0}),
        ("deepseek-v2", {}),
        ("deepseek-v3", {}),
        ("glm4-moe-lite", {}),
        ("youtu", {}),
        ("stablelm", {}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
        ("stablelm", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ("starcoder2", {"sliding_window": None}),
        ("phi", {}),
        ("gpt-neox", {"use_parallel_residual": False}),
        ("falcon", {"num_kv_heads": 1}),
        ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
        ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True}),
        ("gpt2", {}),
        ("bloom", {"seq_length": 512}),
    ],
)
def test_other_families(family: str, settings: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    """Of which the file alone says in what layers or with what matrices they differ."""
    model = make_model(tmp_path / "model", family, **settings)
    check(model, write_gguf(model, tmp_path / "x.gguf"), make_runner, prompts=PROMPTS[:3:2], count=10)


def test_minicpm(tmp_path: Path, make_runner: Any) -> None:
    """Its scales are Granite's, said in another way. Files of 2024 do not say them."""
    model = make_model(tmp_path / "model", "granite", attention_multiplier=0.25)
    own = tmp_path / "own"
    shutil.copytree(model, own)
    scales = {"scale_emb": 6.0, "scale_depth": 0.4 * 3**0.5, "dim_model_base": 64 / 3}
    edit_config(own, model_type="minicpm", embedding_multiplier=None, residual_multiplier=None, logits_scaling=None,
                attention_multiplier=None, **scales)  # fmt: skip
    check(model, write_gguf(own, tmp_path / "x.gguf"), make_runner, prompts=PROMPTS[:3:2], count=10)
    names = ("minicpm__embedding_scale", "minicpm__residual_scale", "minicpm__logit_scale")
    older = unpack(write_gguf(own, tmp_path / "older.gguf", **dict.fromkeys(names)))
    config = json.loads((older / "config.json").read_text())
    assert [round(config[name], 4) for name in scales] == [12, 1.4, 256]


@pytest.mark.parametrize("family", ["mixtral", "cohere2-moe", "qwen3-next"])
def test_experts_with_two_matrices_in_one(family: str, tmp_path: Path, make_runner: Any) -> None:
    settings = {"layer_types": None, "num_hidden_layers": 4} if family == "qwen3-next" else {}
    model = make_model(tmp_path / "model", family, **settings)
    check(model, write_gguf(model, tmp_path / "x.gguf", fused=True), make_runner, prompts=PROMPTS[:3:2], count=10)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("granite", {"granite__rope__scaling__finetuned": False}, "Granite without rotary embedding"),
        ("olmo3", {"olmo2__attention__sliding_window_pattern": [True]}, "a pattern of windows for 1 layers"),
        ("qwen3-moe", {"qwen3moe__expert_count": None}, r"qwen3moe\.expert_count=None"),
        ("gemma3n", {"gemma3n__activation_sparsity_scale": None}, r"no list of numbers gemma3n\.activation_sp"),
        ("nemotron-h", {"nemotron_h_moe__feed_forward_length": [0, 32]}, r"feed_forward_length for 2 layers, and 5"),
        ("gpt-bigcode", {"starcoder__attention__head_count_kv": 4}, "head_count_kv other than 1"),
        ("granite-swa", {"granite_swa__expert_count": 4}, "Granite with windows is read without experts"),
        ("gpt-neox", {"gptneox__attention__layer_norm_epsilon": None}, "layer_norm_epsilon=None"),
    ],
)
def test_other_families_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(make_model(tmp_path / "model", family), tmp_path / "x.gguf", **changes)
    with pytest.raises(Exception, match=rf"^model: x\.gguf: .*{message}"):
        unpack(file)


def test_numbers_of_layers_that_are_not_one_for_each(tmp_path: Path) -> None:
    file = write_gguf(make_model(tmp_path / "model", "apertus"), tmp_path / "x.gguf", xielu__beta=[0.5])
    with pytest.raises(EngineError, match=r"xielu\.beta=\[0\.5\], which should be 3 numbers"):
        Checkpoint(unpack(file))


def experts_in_mxfp4(name: str) -> str:
    return "MXFP4" if ".experts." in name else "F32"


@pytest.mark.parametrize("weights", ["f32", "auto"])
def test_experts_in_mxfp4(weights: str, tmp_path: Path, make_runner: Any) -> None:
    """With `auto` held as they are."""
    model = make_model(tmp_path / "model", "qwen3-moe")
    round_weights(model, experts_in_mxfp4)
    file = write_gguf(model, tmp_path / "x.gguf", experts_in_mxfp4)
    for _ in range(2):  # what is kept on disk is found again
        check(model, file, make_runner, prompts=PROMPTS[:2], count=12, weights=weights)
    assert len(list((tmp_path / "cache").rglob("*.weights"))) == 1


def test_embeddings_in_mxfp4(tmp_path: Path, make_runner: Any) -> None:
    """Rows are taken from them, which the plugin does in int8."""
    file = write_gguf(make_model(tmp_path / "model", "qwen2"), tmp_path / "x.gguf", lambda name: "MXFP4")
    [tokens] = Driver(make_runner(unpack(file))).generate(PROMPTS[:1], 4)
    assert len(tokens) == 4


def mixed(name: str) -> str:
    """As llama.cpp mixes formats: some layers in more bits."""
    return "Q8_0" if "v_proj" in name or "embed" in name else "F16" if "o_proj" in name else "Q4_0"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [lambda name: "Q8_0", lambda name: "Q4_1", lambda name: "BF16", mixed])
def test_block_formats(family: str, kind: Any, tmp_path: Path, make_runner: Any) -> None:
    model = make_model(tmp_path / "model", family)
    round_weights(model, kind)
    check(model, write_gguf(model, tmp_path / "x.gguf", kind), make_runner)


def test_a_file_in_parts_is_one_model_and_a_missing_part_is_named(tmp_path: Path, make_runner: Any) -> None:
    model = make_model(tmp_path / "model")
    first = write_gguf(model, tmp_path / "x-00001-of-00003.gguf", parts=3)
    for number in (1, 2, 3):  # links to files that are called by a checksum, as in the hub's cache
        path = first.with_name(f"x-0000{number}-of-00003.gguf")
        path.symlink_to(path.rename(tmp_path / f"{9 - number}e0d"))
    check(model, first, make_runner)
    first.with_name("x-00002-of-00003.gguf").unlink()
    with pytest.raises(Exception, match=r"one of 3 parts; there is no x-00002-of-00003\.gguf"):
        unpack(first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x-00001-of-00000", "is not one of 0 parts"),
        ("x-00003-of-00002", "is not one of 2 parts"),
        ("x-00002-of-00002", r"x-00002-of-00002\.gguf has a tensor .*, and so has a file beside it"),
    ],
)
def test_parts_that_do_not_go_together(name: str, message: str, tmp_path: Path) -> None:
    file = write_gguf(make_model(tmp_path / "model"), tmp_path / "x-00001-of-00002.gguf")
    shutil.copy(file, tmp_path / f"{name}.gguf")
    with pytest.raises(ConfigError, match=message):
        unpack(tmp_path / f"{name}.gguf")


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_factor_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    """As llama.cpp reads it; files of 2023 have the second key."""
    file = write_gguf(make_model(tmp_path / "model"), tmp_path / "x.gguf", **{f"llama__{key}": 4.0})
    config = json.loads((unpack(file) / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_cached_weights_are_those_of_an_order_of_rows(tmp_path: Path) -> None:
    """Which the metadata say."""
    model = make_model(tmp_path / "model")
    fewer = {
        "llama__attention__head_count": 2,
        "llama__attention__head_count_kv": 1,
        "llama__attention__key_length": 32,
    }
    files = [
        write_gguf(model, tmp_path / f"{len(changes)}.gguf", lambda name: "Q8_0", **changes) for changes in ({}, fewer)
    ]
    assert len({checkpoint_key("int8", Checkpoint(unpack(file))) for file in files}) == 2


def test_experts_without_bytes(tmp_path: Path) -> None:
    """Any number of them fits into a file."""
    blocks = StoredBlocks("F32", (1 << 20, 1, 0), np.zeros((1 << 20, 0), np.uint8))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    with pytest.raises(EngineError, match="which is not that of several matrices"):
        named_tensors({"blk.0.ffn_up_exps.weight": blocks}, ARCHITECTURES["qwen3moe"], config)


def test_as_stored_means_integers_for_blocks(tmp_path: Path, make_runner: Any) -> None:
    model = make_model(tmp_path / "model")
    stored = make_runner(unpack(write_gguf(model, tmp_path / "q.gguf", lambda name: "Q8_0")))
    assert "weights int8" in stored.info.runner
    floats = make_runner(unpack(write_gguf(model, tmp_path / "f.gguf", lambda name: "F16")))
    assert "weights as stored" in floats.info.runner


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture mamba"),
        ({"llama__block_count": None}, r"llama\.block_count=None"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__attention__head_count_kv": [1, 2, 2]}, "differs between layers"),
        ({"llama__rope__freq_base": "x"}, "should be a number"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer of kind bert"),
        ({"tokenizer__ggml__pre": "superbpe"}, "splits texts by 'superbpe'"),
        ({"tokenizer__ggml__merges": ["ab"]}, "'ab', which is no pair"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type has 2"),
        ({"tokenizer__ggml__tokens": None}, "no vocabulary"),
        ({"tokenizer__ggml__token_type": 3}, "token_type has 3"),
        ({"tokenizer__ggml__pre": [1]}, r"splits texts by '\[1\]'"),
        ({"tokenizer__ggml__model": [1]}, r"tokenizer of kind \[1\]"),
        (
            {"llama__attention__head_count": 1000, "llama__attention__key_length": None},
            "1000 heads for embeddings of 64",
        ),
    ],
)
def test_refusals_name_the_reason(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf", **changes)
    with pytest.raises(Exception, match=rf"^model: x\.gguf: .*{message}"):
        unpack(file)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_model_that_lacks_tensors_is_refused(tmp_path: Path, make_runner: Any) -> None:
    model = make_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(EngineError, match=r"no tensor model\.layers\.3\."):
        make_runner(unpack(write_gguf(model, tmp_path / "more.gguf")))
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UnsupportedError, match="tensors that no part of the model uses"):
        make_runner(unpack(write_gguf(model, tmp_path / "fewer.gguf")))
