"""Families that differ from Llama: the tokens of transformers, in f32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.families import parse_config
from support.models import (
    SHAPE,
    edit_config,
    load_reference,
    make_model,
    reference_answers,
    reference_tokens,
)
from support.other_families import OTHER_FAMILIES
from support.runner import Driver, prompt

FILE = "model.safetensors"
SAME_MATRICES = (
    "ministral3", "ministral", "glm4", "ernie4.5", "hunyuan", "seed-oss", "cohere", "cohere2", "arcee", "gemma", "olmo",
    "flex-olmo", "minimax-m2", "dots1", "solar-open", "exaone-moe", "hy-v3", "hunyuan-moe", "granite-moe",
    "flint", "mellum", "mimo-v2", "axk1", "gemma3n", "opt", "gpt-bigcode", "gptj", "gpt-neo",
    "vaultgemma", "jais2", "apertus", "cwm", "nanochat", "helium", "hyperclovax", "granite-swa", "granite-moe-swa",
    "afmoe", "cohere2-moe", "lfm3", "qwen3-next", "qwen3.5-moe", "olmo-hybrid",
)  # fmt: skip
"""Families whose matrices are those of another one."""
COUNT = 24
LENGTHS = (1, 45, 70)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 9.0, 20.0],
}
LONG: dict[str, Any] = {
    "rope_parameters": LONGROPE,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}
IN_GROUPS = {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
GROWING = DEFAULT | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 1.0}


@pytest.mark.families(
    "granite",
    "smollm3",
    "olmo3",
    "gemma2",
    "gemma4",
    "gemma3n",
    "phi3",
    "qwen3-moe",
    "gpt-oss",
    "llama4",
    "ministral3",
    "cohere2",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
    "minicpm3",
    "mimo-v2",
    "afmoe",
    "falcon",
    "gpt2",
    "granite-moe",
)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("granite", {}),
        ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("smollm3", {}),
        ("smollm3", {"no_rope_layers": [0, 1], "num_hidden_layers": 2}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
        ("olmo2", {}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
        ("olmo3", {}),
        ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}}),
        ("gemma2", {}),
        ("gemma2", {"num_key_value_heads": 1, "final_logit_softcapping": None, "sliding_window": 32}),
        ("gemma2", {"attn_logit_softcapping": None, "tie_word_embeddings": True}),
        ("gemma4", {"final_logit_softcapping": 5.0}),
        (
            "gemma4",
            {
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
                "use_bidirectional_attention": "vision",
            },
        ),
        ("gemma3n", {}),
        ("exaone4", {}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("phi3", {}),
        ("phi3", {"sliding_window": 24, "num_key_value_heads": 1}),
        ("phi3", LONG),
        ("mixtral", {}),
        ("mixtral", {"sliding_window": 24, "num_experts_per_tok": 1}),
        ("qwen2-moe", {}),
        ("qwen2-moe", {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": None}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 24, "norm_topk_prob": False}),
        ("olmoe", {}),
        ("gpt-oss", {}),
        ("llama4", {}),
        ("llama4", {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2}),
        ("llama4", {"moe_layers": None, "interleave_moe_layer_step": 2, "attention_chunk_size": None}),
        ("ministral3", {}),
        ("ministral3", {"sliding_window": 24, "rope_parameters": GROWING}),
        ("ministral", {}),
        ("glm", {}),
        ("glm", {"attention_bias": False, "rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}}),
        ("glm4", {}),
        ("ernie4.5", {}),
        ("ernie4.5", {"use_bias": True, "tie_word_embeddings": False}),
        ("hunyuan", {}),
        ("hunyuan", {"attention_bias": True, "rope_parameters": DEFAULT}),
        ("seed-oss", {}),
        ("seed-oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
        ("cohere", {}),
        ("cohere", {"use_qk_norm": True, "attention_bias": True}),
        ("cohere2", {}),
        ("nemotron", {}),
        ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("arcee", {}),
        ("arcee", {"attention_bias": True, "mlp_bias": True}),
        ("gemma", {}),
        ("gemma", {"hidden_act": "gelu", "attention_bias": True}),
        ("olmo", {}),
        ("olmo", {"clip_qkv": 0.5, "num_key_value_heads": 1}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("granite-moe", {}),
        ("granite-moe", {"attention_bias": True, "tie_word_embeddings": True}),
        ("granite-moe-shared", {}),
        ("granite-moe-shared", {"shared_intermediate_size": 0}),
        ("flex-olmo", {}),
        ("flex-olmo", {"norm_topk_prob": True, "attention_bias": True}),
        ("minimax-m2", {}),
        ("phi-moe", {}),
        ("phi-moe", {"attention_bias": True, "lm_head_bias": True, "sliding_window": 24}),
        ("glm4-moe", {}),
        ("glm4-moe", {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 1}),
        ("dots1", {}),
        ("dots1", {"norm_topk_prob": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 2}),
        ("solar-open", {"attention_bias": True}),
        ("exaone-moe", {}),
        ("exaone-moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "norm_topk_prob": False}),
        ("hy-v3", {}),
        ("hy-v3", {"attention_bias": True, "mlp_bias": False, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("ernie4.5-moe", {}),
        (
            "ernie4.5-moe",
            {"use_bias": False, "moe_num_shared_experts": 0, "moe_layer_end_index": 2, "moe_layer_interval": 1},
        ),
        ("hunyuan-moe", {}),
        ("deepseek-v2", {}),
        ("deepseek-v2", {"q_lora_rank": None, "attention_bias": True, "routed_scaling_factor": 2.0} | IN_GROUPS),
        ("deepseek-v3", {}),
        (
            "deepseek-v3",
            {"rope_interleave": False, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}} | IN_GROUPS,
        ),
        ("glm4-moe-lite", {"v_head_dim": 24, "rms_norm_eps": 0.1}),
        ("minicpm3", {}),
        ("minicpm3", {"v_head_dim": None, "scale_depth": None, "dim_model_base": None, "mlp_bias": True}),
        ("youtu", {"attention_bias": True}),
        ("flint", {}),
        ("mellum", {}),
        ("mimo-v2", {}),
        ("axk1", {}),
        ("opt", {}),
        ("gpt-bigcode", {}),
        ("gpt-bigcode", {"multi_query": False}),
        ("gptj", {}),
        ("gpt-neo", {}),
        ("vaultgemma", {}),
        ("jais2", {}),
        ("apertus", {}),
        ("cwm", {}),
        ("nanochat", {}),
        ("helium", {}),
        ("hyperclovax", {}),
        ("granite-swa", {}),
        ("granite-moe-swa", {}),
        ("afmoe", {}),
        ("cohere2-moe", {}),
        ("stablelm", {}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
        ("starcoder2", {}),
        ("starcoder2", {"use_bias": False, "sliding_window": None}),
        ("phi", {}),
        ("gpt-neox", {}),
        ("gpt-neox", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "relu"}),
        ("falcon", {}),
        ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
        ("gpt2", {}),
        ("gpt2", {"n_inner": 96, "scale_attn_weights": False}),
        ("bloom", {}),
        ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    ],
)
def test_tokens_of_every_family_are_those_of_the_reference(
    family: str, settings: dict[str, Any], tmp_path: Path, make_runner: Any
) -> None:
    make_model(tmp_path, family, **settings)
    prompts = [prompt(length, length) for length in LENGTHS]
    reference = load_reference(tmp_path)
    found = Driver(make_runner(tmp_path)).generate(prompts, COUNT)
    assert len({tuple(tokens) for tokens in found}) == len(found), "the model says the same whatever the prompt"
    assert found == reference_answers(reference, prompts, COUNT, found)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}])
def test_stretched_contexts(rope: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    """Beyond max_position_embeddings, and with nothing that says how long the original context was."""
    make_model(tmp_path, rope_parameters={**rope, "rope_theta": 1e4}, max_position_embeddings=64)
    edit_config(tmp_path, rope_scaling=rope, rope_theta=1e4, rope_parameters=None)
    runner = make_runner(tmp_path)
    assert runner.info.max_model_len == 512
    prompts = [prompt(300, 1), prompt(60, 2)]
    found = Driver(runner).generate(prompts, COUNT)
    assert len({tuple(tokens) for tokens in found}) == 2
    assert found == reference_answers(load_reference(tmp_path), prompts, COUNT, found)


@pytest.mark.families("gemma2", "gemma4", "qwen3-moe", "gpt-oss", "deepseek-v3", "phi3", "falcon", "llama4")
@pytest.mark.parametrize("family", [family for family in OTHER_FAMILIES if family not in SAME_MATRICES])
def test_quantized_weights(family: str, tmp_path: Path, make_runner: Any) -> None:
    """Wide enough for 4 bits; in 8 are the embeddings, the head and what hurts most."""
    make_model(tmp_path, family, hidden_size=128, intermediate_size=256)
    [tokens] = Driver(make_runner(tmp_path, weights="int4")).generate([prompt(45, 1)], 4)
    assert len(tokens) == 4


def test_no_list_and_an_empty_one_of_layers_without_rope_mean_the_same() -> None:
    """Llama 4 is published with an empty one."""
    config = SHAPE | {"architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 96, "num_hidden_layers": 4}
    ropes = parse_config(config | {"no_rope_layers": []}).ropes
    assert [rope is not None for rope in ropes] == [True, True, True, False]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("llama4", {"moe_layers": [7]}, "moe_layers"),
        ("mistral", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("llama4", {"floor_scale": 0}, "floor_scale"),
        ("ministral3", {"rope_parameters": GROWING | {"original_max_position_embeddings": None}}, "original_max"),
        ("ministral3", {"rope_parameters": GROWING | {"llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta=x"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 leaves no layer with keys for layer 1"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config has more"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 heads of size 16 on 3"),
        ("gemma4", {"vocab_size_per_layer_input": "x"}, "vocab_size_per_layer_input=x"),
        ("gemma3n", {"altup_active_idx": 3}, "altup_active_idx=3, of 3"),
        ("gemma3n", {"activation_sparsity_pattern": [1.5] * 4}, "activation_sparsity_pattern is not"),
        ("llama", {"intermediate_size": [96, 64, 96]}, r"intermediate_size=\[96, 64, 96\], which is not"),
        ("granite-swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta is not understood"),
        ("cohere2-moe", {"expert_selection_fn": "x"}, "expert_selection_fn"),
        ("opt", {"do_layer_norm_before": False}, "OPT with norms behind"),
        ("gpt-neo", {"attention_layers": None, "attention_types": [[["x"], 3]]}, "attention_types is not understood"),
        ("mimo-v2", {"v_head_dim": 32}, "values of 32: they do not fit"),
        ("hunyuan", {"use_cla": True}, "use_cla"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("cohere", {"logit_scale": 0}, "logit_scale"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
        ("olmo", {"clip_qkv": -1.0}, "clip_qkv"),
        ("deepseek-v3", {"n_group": 4}, "n_group=4"),
        ("deepseek-v3", {"n_group": 6, "topk_group": 3}, "n_group=6"),
        ("deepseek-v3", {"n_group": 3, "num_experts_per_tok": 3}, "topk_group=1, and chooses 3 of 6 experts"),
        ("deepseek-v3", {"v_head_dim": 25}, "v_head_dim=25, which is more than a head of 24"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
        ("deepseek-v2", {"kv_lora_rank": "x"}, "kv_lora_rank=x, which is not a size"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "1 divisors for 4"),
        ("olmo2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1e12}}, "partial_rotary_factor=1000000000000.0 is"),
    ],
)
def test_a_setting_that_would_change_the_model_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path, make_runner: Any
) -> None:
    make_model(tmp_path, family)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=named):
        make_runner(tmp_path)


def test_published_settings_of_gemma4(tmp_path: Path, make_runner: Any) -> None:
    """Sizes of heads by the kind of layer, and keys and values of layers that read those of others."""
    make_model(tmp_path, "gemma4")
    wanted = reference_tokens(load_reference(tmp_path), prompt(45, 2), COUNT)
    edit_config(tmp_path, per_layer_config=None, global_head_dim=32, num_global_key_value_heads=None)
    tensors = load_file(tmp_path / FILE)
    spare = {name.replace("3", "5", 1): tensors[name].clone() for name in tensors if "layers.3.self_attn.k" in name}
    save_file({**tensors, **spare}, tmp_path / FILE, {"format": "pt"})
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 2)], COUNT) == [wanted]


def test_capped_scores_need_floats_of_32_bits(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "gemma2")
    for changes in ({"dtype": "bf16"}, {"kv_cache_dtype": "u8"}):
        [(name, value)] = changes.items()
        with pytest.raises(UnsupportedError, match=f"{name}={value} cannot be combined with capped scores"):
            make_runner(tmp_path, **changes)
    assert " f32, weights as stored, kv f16," in make_runner(tmp_path, dtype="auto").info.runner


def test_exaone_3(tmp_path: Path, make_runner: Any) -> None:
    """transformers reads its checkpoints as Llama's, with other names."""
    make_model(tmp_path, "llama-llama3")
    layer = {"self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "gate_proj": "c_fc_0",
             "up_proj": "c_fc_1", "down_proj": "c_proj", "input_layernorm": "ln_1",
             "post_attention_layernorm": "ln_2"}  # fmt: skip
    names = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h"}
    tensors = {}
    for name, value in load_file(tmp_path / FILE).items():
        for usual, own in (names | layer).items():
            name = name.replace(usual, own)
        tensors[name] = value
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    edit_config(tmp_path, architectures=["ExaoneForCausalLM"], model_type="exaone", num_hidden_layers=None,
                num_layers=3, hidden_act=None, activation_function="silu", rms_norm_eps=None,
                layer_norm_epsilon=1e-6)  # fmt: skip
    wanted = reference_tokens(load_reference(tmp_path), prompt(70, 6), COUNT)
    assert Driver(make_runner(tmp_path)).generate([prompt(70, 6)], COUNT) == [wanted]


def test_minicpm(tmp_path: Path, make_runner: Any) -> None:
    """transformers has no code for it. Its scales are Granite's, said in another way."""
    make_model(tmp_path, "granite", attention_multiplier=0.25)
    wanted = reference_tokens(load_reference(tmp_path), prompt(70, 6), COUNT)
    granites = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    edit_config(tmp_path, architectures=["MiniCPMForCausalLM"], model_type="minicpm", auto_map={}, num_experts=0,
                **dict.fromkeys(granites), scale_emb=6.0, scale_depth=0.4 * 3**0.5, dim_model_base=64 / 3)  # fmt: skip
    assert Driver(make_runner(tmp_path)).generate([prompt(70, 6)], COUNT) == [wanted]
    edit_config(tmp_path, num_experts=8)
    with pytest.raises(UnsupportedError, match="of MiniCPM, mixtures of experts"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi-moe", "PhiMoEForCausalLM"),
        ("exaone-moe", "ExaoneMoEForCausalLM"),
        ("ernie4.5", "Ernie4_5_ForCausalLM"),
        ("llama", "LLaMAForCausalLM"),
    ],
)
def test_names_that_makers_give(family: str, name: str, tmp_path: Path) -> None:
    """transformers has other ones, and finds its own by model_type."""
    make_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    assert repr(parse_config(config | {"architectures": [name]})) == repr(parse_config(config))  # arrays are in it


def test_patterns_in_letters(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "exaone4", layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
               num_hidden_layers=6)  # fmt: skip
    wanted = reference_tokens(load_reference(tmp_path), prompt(70, 2), COUNT)
    edit_config(tmp_path, layer_types=None, sliding_window_pattern="LLG")
    assert Driver(make_runner(tmp_path)).generate([prompt(70, 2)], COUNT) == [wanted]


def test_longrope_has_the_frequencies_of_the_longest_context(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "phi3", **LONG)
    assert make_runner(tmp_path).info.max_model_len == 128
    wanted = reference_tokens(load_reference(tmp_path), prompt(140, 3), COUNT)  # behind 128 tokens from its start
    runner = make_runner(tmp_path, max_model_len=256)
    assert Driver(runner).generate([prompt(140, 3)], COUNT) == [wanted]


def test_older_files_of_gpt2(tmp_path: Path, make_runner: Any) -> None:
    """Without the beginning of each name, and with a mask for each layer."""
    make_model(tmp_path, "gpt2")
    wanted = reference_tokens(load_reference(tmp_path), prompt(45, 4), COUNT)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / FILE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512, dtype=torch.uint8).tril() for layer in range(3)}
    save_file(tensors | masks, tmp_path / FILE, {"format": "pt"})
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 4)], COUNT) == [wanted]


def test_older_settings_of_gpt_neox(tmp_path: Path, make_runner: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    make_model(tmp_path, "gpt-neox", rope_parameters=rope)
    wanted = reference_tokens(load_reference(tmp_path), prompt(45, 5), COUNT)
    edit_config(tmp_path, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=500)
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 5)], COUNT) == [wanted]
