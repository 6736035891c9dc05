"""What the runner cannot do is refused by name when a model is loaded; nothing is ignored."""

from __future__ import annotations

import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.openvino.families import FAMILIES, parse_config
from support.models import edit_config, load_reference, make_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MptForCausalLM"]},
            "MptForCausalLM is not supported .* LlamaForCausalLM, .*MistralForCausalLM, ",
        ),
        ({"architectures": None}, "unnamed is not supported"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "evil.py"}}, r"auto_map\) is never run"),
        ({"hidden_act": "relu6"}, "hidden_act='relu6' is not supported; supported are silu, gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method=aqlm, which is not supported"),
        ({"text_config": {}}, "text_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: models that attend to later tokens"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' .* default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE type 'linear' needs 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each layer type"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\], which is not an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'linear' are not understood"),
        ({"rope_theta": "ten"}, "'default' are not understood"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer_types is not understood",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 3}, "3 entries for 4 layers"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "no sliding window"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"] * 5}, "5 entries for 4 layers"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": [["full_attention"]] * 4}, "is not understood"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 0}, "no sliding window"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "tanh"}, "hidden_activation='tanh'"),
        ({"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "for each of full_attention, sliding_attention, not factor, rope_type",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"sliding_attention": "linear"}},
            "sliding_attention=linear, which is not an object",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_scaling": "linear"}, "rope_scaling=linear, which is not an"),
        ({"num_key_value_heads": 3}, "32 heads of size 16 on 3 for keys and values do not go together"),
        ({"head_dim": 15}, "32 heads of size 15"),
        ({"num_hidden_layers": 0}, "a 0 among .* num_hidden_layers"),
        ({"num_attention_heads": 0}, "a 0 among num_attention_heads"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": "2"},
            "max_window_layers=2, which is not a number of layers",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2.5}, "sliding_window_pattern=2.5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps=small, which is not a positive number"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9}, "chooses 2 of 1000000000 experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": "1"}, "moe_intermediate_size=1, which"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True},
            "use_sliding_window without layer_types",
        ),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 0}, "clip_qkv=0, which is not a positive number"),
        ({"clip_qkv": 8.0}, "clip_qkv: queries, keys and values with a limit"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm"),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi: ALiBi in this family"),
        ({"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0}, "swiglu_limit=0, which is not a positive number"),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": -1}, "hidden_size=-1, which is not a number"),
        ({"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True}, "residuals behind"),
    ],
)
def test_settings_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(UnsupportedError, match=message):
        parse_config(config)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sizes_that_no_model_has(architecture: str) -> None:
    keys = [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "sliding_window",
    ]
    tracemalloc.start()
    try:
        for key, value in product(keys, (10**8, -1, 4.0, "4", True, [4])):
            with pytest.raises(UnsupportedError, match=f"{key}=.* not a number from 0 to "):
                parse_config({**CONFIG, "architectures": [architecture], key: value})
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, (key, value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sizes_that_are_null(architecture: str) -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        with pytest.raises(UnsupportedError, match=f"lacks '{key}'"):
            parse_config({**CONFIG, "architectures": [architecture], key: None})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_plain_config_is_enough(architecture: str) -> None:
    """Beside what dots.llm1 has no defaults for, what DeepSeek V3 and Gemma 3n have others for, and kinds of layers of
    Granite 4 and Bamba."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    groups = {"n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0}
    kinds: dict[str, Any] = {"attn_layer_indices": [1]} if architecture.startswith("Bamba") else {}
    if architecture.startswith("GraniteMoeHybrid"):
        kinds = {"layer_types": ["mamba"] * 3 + ["attention"]}
    spec = parse_config({**CONFIG, **experts, **groups, **kinds, "architectures": [architecture]})
    has_both = all(layer.with_states for layer in spec.layers)
    assert (spec.num_layers, len(spec.windows)) == (4, 1 if spec.is_hybrid and not has_both else 4)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"sliding_window": 9}, (0, 0, 0, 0)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 9)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, 0, 9, 0),
        ),
    ],
)
def test_qwen_sliding_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**CONFIG, "architectures": ["Qwen2ForCausalLM"], **changes}).windows == windows


@pytest.mark.parametrize(("window", "windows"), [({"sliding_window": None}, (0,) * 4), ({}, (4096,) * 4)])
def test_mistral_sliding_window(window: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**CONFIG, "architectures": ["MistralForCausalLM"], **window}).windows == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"num_hidden_layers": 7}, (4096,) * 5 + (0, 4096)),
        ({"sliding_window": 9, "sliding_window_pattern": 2}, (9, 0, 9, 0)),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (0, 0, 0, 9)),
    ],
)
def test_gemma_sliding_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**CONFIG, "architectures": ["Gemma3ForCausalLM"], **changes}).windows == windows


def test_tensors_that_the_graph_would_ignore(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama-biases")
    edit_config(tmp_path, attention_bias=False)
    with pytest.raises(UnsupportedError, match=r"12 tensors that no part of the model uses: .*k_proj\.bias"):
        make_runner(tmp_path)


def test_tensors_that_are_missing(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, attention_bias=True)
    with pytest.raises(EngineError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_runner(tmp_path)


def test_tensors_of_another_shape(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, vocab_size=383)
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight has shape \(384, 64\)"):
        make_runner(tmp_path)


def test_leftovers_that_change_nothing(tmp_path: Path, make_runner: Any) -> None:
    """Old checkpoints carry RoPE's frequencies, some tied ones a copy of the head."""
    make_model(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = load_reference(tmp_path).lm_head.weight.data.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert make_runner(tmp_path).info.vocab_size == 384


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_config_that_is_no_config(text: str, tmp_path: Path, make_runner: Any) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json"):
        make_runner(tmp_path)


def test_no_model_at_all(tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        make_runner(tmp_path / "nowhere")
