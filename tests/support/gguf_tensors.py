"""Tensors of GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from penstock.engines.formats.safetensors_file import read_safetensors

Values = npt.NDArray[np.float32]
Converted = Iterator[tuple[str, Values]]
_ARCHITECTURES = {
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "gpt_oss": "gpt-oss",
    "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "falcon_h1": "falcon-h1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "exaone_moe": "exaone-moe",
    "cohere2_moe": "cohere2moe",
    "gpt_bigcode": "starcoder",
    "glm": "chatglm",
    "solar_open": "glm4moe",
}
"""By model_type, where they are called otherwise."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
_PAIRS = (
    *("llama", "mixtral", "granite", "smollm3", "ministral3", "arcee", "olmo", "minicpm"),
    *("granitemoe", "granitemoeshared", "granitemoehybrid", "granite_swa"),
)
"""Model types whose queries and keys are turned in neighbouring pairs."""
_NAMED_LIKE = {"hy_v3": "exaone-moe", "cohere2moe": "exaone-moe", "mellum": "qwen3moe", "granite_swa": "granite"}
"""Architectures that the package has no names for yet, and others with the same ones."""
_MOST_LAYERS = 8
_STACKED = re.compile(r"(.*\.experts|model\.altup_(?:unembed_)?projections)\.(\d+)\.(.+)")


def architecture_of(family: str, config: dict[str, Any]) -> str:
    """`family`: the model_type."""
    if family == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config["layers_block_type"] else family
    return _ARCHITECTURES.get(family, family)


def converted_tensors(folder: Path, family: str, config: dict[str, Any]) -> dict[str, tuple[str, Values]]:
    """By their names in the file: those in the folder, and values."""
    own = architecture_of(family, config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == _NAMED_LIKE.get(own, own))
    names = gguf.get_tensor_name_map(architecture, _MOST_LAYERS)
    stored = {name: tensor.f32() for name, tensor in read_safetensors(folder / "model.safetensors")[0].items()}
    found = {}
    for original, values in _merged(stored):
        for name, part in _converted(original, values, family, config):
            renamed = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
            assert renamed is not None, name
            found[renamed] = (original, np.ascontiguousarray(part, np.float32))
    factors = _rope_factors(config)
    if factors is not None:
        found["rope_freqs.weight"] = ("", factors)
    rope = config.get("rope_parameters") or {}
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            found[f"rope_factors_{length}.weight"] = ("", np.array(rope[f"{length}_factor"], np.float32))
    return found


def fused_experts(tensors: dict[str, tuple[str, Values]]) -> dict[str, tuple[str, Values]]:
    """As the converter's --fuse-gate-up-exps."""
    found = {}
    for name, (original, values) in tensors.items():
        if ".ffn_gate_exps." in name:
            both = np.concatenate([values, tensors[name.replace("gate", "up")][1]], 1)
            found[name.replace("gate", "gate_up")] = original, both
        elif ".ffn_up_exps." not in name:
            found[name] = original, values
    return found


def _merged(stored: dict[str, Values]) -> Converted:
    """With one tensor for the experts of a layer, and for AltUp's matrices."""
    experts: dict[str, list[Values]] = {}
    for name in sorted(
        stored, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    ):
        match = _STACKED.fullmatch(name)
        if match is None:
            yield name, stored[name]
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(stored[name])
    yield from ((name, np.stack(values)) for name, values in experts.items())


def _converted(name: str, values: Values, family: str, config: dict[str, Any]) -> Converted:
    """By the names that gguf's table has, or that the file has."""
    part = name.rpartition(".")[0]
    if family in _RULES:
        yield from _RULES[family](name, values, config)
        return
    heads = size_of(config, "num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    if family in _PAIRS and part.endswith((".q_proj", ".k_proj")):
        count = heads if part.endswith(".q_proj") else key_heads
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    plus_one = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_next")
    if family in plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    if ".linear_attn." in name and family != "qwen3_next":
        name, values = _delta_net(name, values, config)
    if family == "granitemoehybrid":
        name, values = _state_space(name, values, config["mamba_n_groups"])
    if name.endswith("A_log") and family == "qwen3_next":
        values = -np.exp(values)
    if name.endswith("conv1d.weight"):
        values = values.reshape(len(values), -1)
    name = name.replace("dt_bias", "dt_proj.bias")
    if family == "gpt2" and part.endswith((".c_attn", ".c_proj", ".c_fc")) and values.ndim > 1:
        values = values.T
    if part.endswith(".query_key_value"):
        groups = config["num_kv_heads"] if family == "falcon" else heads
        grouped = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
        each = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        values = np.concatenate([some.reshape(-1, *values.shape[1:]) for some in each])
    if family == "bloom":
        name = name.removeprefix("transformer.")
    if ".block_sparse_moe.experts." in name:
        name = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("moe_statics", "gate")
    if name.endswith("conv.conv.weight"):
        values = values.squeeze(1)
    if ".feed_forward.experts." in name:
        name = name.removeprefix("model.")
    name = name.replace(".expert_bias", ".expert_bias.bias")
    if name.endswith(".sinks"):
        name = f"blk.{_layer(name)}.attn_sinks.weight"
    if name.endswith("in_proj_qkvz.weight"):
        yield from _by_key_head(name, values, config)
    elif name.endswith("kv_b_proj.weight") and family in LATENT:
        both = values.reshape(heads, -1, values.shape[1])
        keys, values = np.split(both, [config["qk_nope_head_dim"]], 1)
        yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif "_linear" in name and family.startswith("granitemoe"):
        yield from _granite_experts(name, values, bool(config["num_local_experts"]))
    elif family == "gpt_oss" and ".experts." in name:
        yield from _gpt_oss_experts(name, values)
    else:
        yield name, values


def _gemma3n(name: str, values: Values, config: dict[str, Any]) -> Converted:
    yield name + ".weight" * name.endswith("_scale"), values


def _gemma4(name: str, values: Values, config: dict[str, Any]) -> Converted:
    layer = _layer(name)
    match name.partition(f"layers.{layer}.")[2]:
        case "layer_scalar":
            yield name + ".weight", values
        case "router.scale":
            yield f"blk.{layer}.ffn_gate_inp.scale", values
        case "router.per_expert_scale":
            yield f"blk.{layer}.ffn_down_exps.scale", values
        case "experts.gate_up_proj" | "experts.down_proj":
            yield name + ".weight", values
        case _:
            yield name, values


def _state_space(name: str, values: Values, groups: int) -> tuple[str, Values]:
    if name.endswith("A_log"):
        return name, -np.exp(values)[:, None]
    if name.endswith(".D"):
        return name, values[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return name, values.reshape(groups, -1)
    if name.endswith("conv1d.weight"):
        return name, values.reshape(len(values), -1)
    return name.replace("dt_bias", "dt_proj.bias"), values


def _falcon_h1(name: str, values: Values, config: dict[str, Any]) -> Converted:
    """The scales are in the matrices."""
    scales = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    name, values = _state_space(name, values, config["mamba_n_groups"])
    values = values * np.float32(scales.get(name.split(".")[-2], 1.0))
    if name.endswith("in_proj.weight"):
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, group, group, config["mamba_n_heads"]]
        values = values * np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)[:, None]
    yield (f"blk.{_layer(name)}.ffn_norm" if ".pre_ff_layernorm." in name else name), values


def _nemotron_h(name: str, values: Values, config: dict[str, Any]) -> Converted:
    name, values = _state_space(name, values, config["n_groups"])
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield re.sub(r"backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name), values


def _llama4(name: str, values: Values, config: dict[str, Any]) -> Converted:
    if name.endswith("gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values.swapaxes(1, 2), 2, 1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("down_proj"):
        yield name + ".weight", values.swapaxes(1, 2)
    else:
        yield name, values


def _hy_v3(name: str, values: Values, config: dict[str, Any]) -> Converted:
    yield (f"blk.{_layer(name)}.exp_probs_b" if name.endswith("expert_bias") else name), values


def _apertus(name: str, values: Values, config: dict[str, Any]) -> Converted:
    """What the activation learned is in the settings."""
    if ".act_fn." not in name:
        yield name, values


def _layer(name: str) -> str:
    return re.sub(r".*layers\.(\d+)\..*", r"\1", name)


_RULES: dict[str, Callable[[str, Values, dict[str, Any]], Converted]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "llama4": _llama4,
    "hy_v3": _hy_v3,
    "apertus": _apertus,
}
"""Of families that have nothing in common with the others."""


def _delta_net(name: str, values: Values, config: dict[str, Any]) -> tuple[str, Values]:
    """Heads of values in llama.cpp's order, and A in place of its logarithm."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]

    def tiled(rows: Values) -> Values:
        grouped = rows.reshape(key_heads, heads // key_heads, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        values = np.concatenate([values[:keys], tiled(values[keys:])]).reshape(len(values), -1)
    elif "out_proj" in name:
        values = tiled(values.T).T
    elif not name.endswith("norm.weight"):
        values = tiled(values)
    if name.endswith("A_log"):
        values = -np.exp(values)
    return name, values


def _by_key_head(name: str, values: Values, config: dict[str, Any]) -> Converted:
    """Qwen3-Next's matrix as one of queries, keys and values, and one of gates."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, group = config["linear_key_head_dim"], heads // key_heads * config["linear_value_head_dim"]
    grouped = values.reshape(key_heads, -1, values.shape[1])
    parts = np.split(grouped, np.cumsum([key_dim, key_dim, group]), 1)
    q, k, v, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
    yield name.replace("qkvz", "z"), gates


def _granite_experts(name: str, values: Values, mixed: bool) -> Converted:
    """`mixed`: there are experts beside the MLP that every token has."""
    owner = "mlp.experts" if values.ndim == 3 else "mlp.shared_experts" if mixed else "mlp"
    prefix = re.sub(r"(block_sparse_moe|shared_mlp)\..*", owner, name)
    names = ["down_proj"] if "output" in name else ["gate_proj", "up_proj"]
    yield from (
        (f"{prefix}.{part}.weight", some)
        for part, some in zip(names, np.split(values, len(names), axis=-2), strict=True)
    )


def _gpt_oss_experts(name: str, values: Values) -> Converted:
    prefix, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if part.startswith("gate_up"):
        yield f"{prefix}.gate_proj.{kind}", values[:, 0::2]
        yield f"{prefix}.up_proj.{kind}", values[:, 1::2]
    else:
        yield f"{prefix}.down_proj.{kind}", values


def _rope_factors(config: dict[str, Any]) -> Values | None:
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", {})
    if whole.get("rope_type") == "proportional":
        half = global_head(config) // 2
        return np.where(np.arange(half) < int(whole["partial_rotary_factor"] * half), 1, 1e30).astype(np.float32)
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def size_of(config: dict[str, Any], name: str) -> int:
    own = {"hidden_size": ("n_embd", "n_embed"), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",)}
    own["max_position_embeddings"] = ("n_positions", "seq_length")
    if name == "num_hidden_layers" and "layers_block_type" in config:
        return len(config["layers_block_type"])
    return next(config[key] for key in (*own.get(name, ()), name) if config.get(key) is not None)


def global_head(config: dict[str, Any]) -> int:
    """Size of a head of Gemma 4's layers without a window."""
    return next(own["head_dim"] for own in config["per_layer_config"].values() if own.get("head_dim"))
