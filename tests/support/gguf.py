"""GGUF files out of Hugging Face's folders, by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from penstock.engines.formats.safetensors_file import read_safetensors

Kind = Callable[[str], str]
"""The block format of a tensor, by the name that Hugging Face gives it."""

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
}
"""By model_type, where they are called otherwise."""
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
_PAIRS = (
    *("llama", "mixtral", "granite", "smollm3", "ministral3", "arcee", "olmo"),
    *("granitemoe", "granitemoeshared", "granitemoehybrid"),
)
"""Model types whose queries and keys are turned in neighbouring pairs."""
_MOST_LAYERS = 8
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_KINDS_OF_TOKENS = {True: 3, False: 1}


def write_gguf(folder: Path, path: Path, kind: Kind = lambda name: "F32", parts: int = 1, **metadata: Any) -> Path:
    """The model of `folder` in one file, or in `parts` of which `path` is the first; `metadata`, with `__` for a dot,
    is added to what is said or takes its place. Returns `path`."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"].removesuffix("_text")
    name = _ARCHITECTURES.get(family, family)
    tensors = list(_tensors(folder, family, config).items())
    size = -(-len(tensors) // parts)
    for number in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.name[:-20]}-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(file, name)
        if number == 0:
            _write_settings(writer, family, config, folder)
            for key, value in metadata.items():
                _write_value(writer, key.replace("__", "."), value)
        for tensor, (original, values) in tensors[number * size : (number + 1) * size]:
            plain = values.ndim == 1 or tensor.endswith(".bias")
            quantized = GGMLQuantizationType["F32" if plain else kind(original)]
            writer.add_tensor(tensor, quantize(values, quantized), raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def round_weights(folder: Path, kind: Kind) -> None:
    """Gives the model of `folder` the matrices that its file in these formats holds."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, values in weights.items():
        if values.ndim == 2:
            quantized = GGMLQuantizationType[kind(name)]
            weights[name] = dequantize(quantize(values, quantized), quantized)
    save_file(weights, file, {"format": "pt"})


def _tensors(folder: Path, family: str, config: dict[str, Any]) -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
    """By their names in the file: those in the folder, and values."""
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == _ARCHITECTURES.get(family, family)
    )
    names = gguf.get_tensor_name_map(architecture, _MOST_LAYERS)
    stored = {name: tensor.f32() for name, tensor in read_safetensors(folder / "model.safetensors")[0].items()}
    found = {}
    for original, values in _merged(stored):
        for name, part in _converted(original, values, family, config):
            renamed = names.get_name(name, (".weight", ".bias"))
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


def _merged(stored: dict[str, npt.NDArray[np.float32]]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """With one tensor for the experts of a layer."""
    experts: dict[str, list[npt.NDArray[np.float32]]] = {}
    for name in sorted(
        stored, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    ):
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, stored[name]
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(stored[name])
    yield from ((name, np.stack(values)) for name, values in experts.items())


def _converted(
    name: str, values: npt.NDArray[np.float32], family: str, config: dict[str, Any]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """By the names that gguf's table has."""
    part = name.rpartition(".")[0]
    heads = _size(config, "num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    if family in _PAIRS and part.endswith((".q_proj", ".k_proj")):
        count = heads if part.endswith(".q_proj") else key_heads
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    plus_one = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_next")
    if family in plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    if ".linear_attn." in name and family != "qwen3_next":
        name, values = _delta_net(name, values, config)
    if name.endswith(("A_log", "mamba.D", "mamba.norm.weight")) and family == "granitemoehybrid":
        values = -np.exp(values) if name.endswith("A_log") else values
        values = values.reshape(config["mamba_n_groups"], -1) if name.endswith("norm.weight") else values[:, None]
    elif name.endswith("A_log") and family == "qwen3_next":
        values = -np.exp(values)
    if name.endswith("conv1d.weight"):
        values = values.reshape(len(values), -1)
    name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("layer_scalar"):
        name += ".weight"
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
        name += ".weight"
    if name.endswith("in_proj_qkvz.weight"):
        yield from _by_key_head(name, values, config)
    elif name.endswith("kv_b_proj.weight") and family in _LATENT:
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


def _delta_net(
    name: str, values: npt.NDArray[np.float32], config: dict[str, Any]
) -> tuple[str, npt.NDArray[np.float32]]:
    """Heads of values in llama.cpp's order, and A in place of its logarithm."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]

    def tiled(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
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


def _by_key_head(
    name: str, values: npt.NDArray[np.float32], config: dict[str, Any]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Qwen3-Next's matrix as one of queries, keys and values, and one of gates."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, group = config["linear_key_head_dim"], heads // key_heads * config["linear_value_head_dim"]
    grouped = values.reshape(key_heads, -1, values.shape[1])
    parts = np.split(grouped, np.cumsum([key_dim, key_dim, group]), 1)
    q, k, v, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
    yield name.replace("qkvz", "z"), gates


def _granite_experts(
    name: str, values: npt.NDArray[np.float32], mixed: bool
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """`mixed`: there are experts beside the MLP that every token has."""
    owner = "mlp.experts" if values.ndim == 3 else "mlp.shared_experts" if mixed else "mlp"
    prefix = re.sub(r"(block_sparse_moe|shared_mlp)\..*", owner, name)
    names = ["down_proj"] if "output" in name else ["gate_proj", "up_proj"]
    yield from (
        (f"{prefix}.{part}.weight", some)
        for part, some in zip(names, np.split(values, len(names), axis=-2), strict=True)
    )


def _gpt_oss_experts(name: str, values: npt.NDArray[np.float32]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    prefix, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if part.startswith("gate_up"):
        yield f"{prefix}.gate_proj.{kind}", values[:, 0::2]
        yield f"{prefix}.up_proj.{kind}", values[:, 1::2]
    else:
        yield f"{prefix}.down_proj.{kind}", values


def _rope_factors(config: dict[str, Any]) -> npt.NDArray[np.float32] | None:
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", {})
    if whole.get("rope_type") == "proportional":
        half = _global_head(config) // 2
        return np.where(np.arange(half) < int(whole["partial_rotary_factor"] * half), 1, 1e30).astype(np.float32)
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _size(config: dict[str, Any], name: str) -> int:
    own = {"hidden_size": ("n_embd", "n_embed"), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",)}
    own["max_position_embeddings"] = ("n_positions", "seq_length")
    return next(config[key] for key in (*own.get(name, ()), name) if config.get(key) is not None)


def _write_settings(writer: gguf.GGUFWriter, family: str, config: dict[str, Any], folder: Path) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    writer.add_block_count(_size(config, "num_hidden_layers"))
    writer.add_context_length(_size(config, "max_position_embeddings"))
    writer.add_embedding_length(hidden)
    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("moe_intermediate_size")
    writer.add_feed_forward_length(4 * hidden if family in ("bloom", "falcon", "gpt2") else inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_kv_heads" if family == "falcon" else "num_key_value_heads") or heads)
    if family in ("bloom", "gpt2", "gpt_neox"):
        writer.add_head_count_kv(heads)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if key in config:
            writer.add_layer_norm_eps(config[key])
    if family.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        attends = [kind == "full_attention" for kind in config["layer_types"]]
        _write_value(
            writer, f"{writer.arch}.attention.head_count_kv", [config["num_key_value_heads"] * n for n in attends]
        )
    if family == "granitemoehybrid":
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_ssm_inner_size(config["mamba_expand"] * hidden)
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
        heads_by_layer = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
        _write_value(writer, f"{writer.arch}.attention.head_count_kv", heads_by_layer)
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    if family == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(
            int(rope["partial_rotary_factor"] * (config.get("head_dim") or hidden // heads))
        )
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    _write_windows(writer, family, config)
    _write_experts(writer, config)
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("use_parallel_residual", writer.add_parallel_residual),
        ("logit_scale", writer.add_logit_scale),
        ("clip_qkv", writer.add_clamp_kqv),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("route_scale", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope.get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(factor)
    if family in _LATENT:
        _write_latent(writer, config)
    if family == "gemma4":
        _write_gemma4(writer, config)
    _write_tokenizer(writer, folder)


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Last among the sizes of heads, of which files have those of what is compressed, too."""
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    for name, value in (
        ("attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"]),
        ("attention.value_length", config["kv_lora_rank"]),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", config["qk_rope_head_dim"]),
    ):
        _write_value(writer, f"{writer.arch}.{name}", value)
    if config.get("n_routed_experts"):
        sigmoids = config["model_type"] != "deepseek_v2"
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SIGMOID if sigmoids else gguf.ExpertGatingFuncType.SOFTMAX
        )
        writer.add_expert_group_count(config["n_group"] or 1)
        writer.add_expert_group_used_count(config["topk_group"] or 1)


def _global_head(config: dict[str, Any]) -> int:
    """Size of a head of Gemma 4's layers without a window."""
    return next(own["head_dim"] for own in config["per_layer_config"].values() if own.get("head_dim"))


def _write_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide = [config["intermediate_size"]] * len(windowed)
    if config["use_double_wide_mlp"]:
        for n in range(1, config["num_kv_shared_layers"] + 1):
            wide[-n] *= 2
    for name, value in (
        ("attention.key_length", _global_head(config)),
        ("rope.dimension_count", _global_head(config)),
        ("attention.key_length_swa", config["head_dim"]),
        ("attention.shared_kv_layers", config["num_kv_shared_layers"]),
        ("embedding_length_per_layer_input", config["hidden_size_per_layer_input"]),
        ("feed_forward_length", wide),
        ("rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        ("attention.sliding_window", config["sliding_window"]),
        ("attention.sliding_window_pattern", windowed),
    ):
        _write_value(writer, f"{writer.arch}.{name}", value)


def _write_windows(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """Other converters leave them out."""
    families = ("gemma2", "gemma3", "olmo3", "exaone4", "gpt_oss", "phi3", "cohere2", "afmoe")
    if family not in families or not config.get("sliding_window"):
        return
    writer.add_sliding_window(config["sliding_window"])
    if family in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: i for i, token in added.items()}
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    if not merges:  # the writer leaves out an empty list
        texts, merges = [*texts, "ĠĠ"], ["Ġ Ġ"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types([_KINDS_OF_TOKENS[i in added] for i in range(len(texts))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else settings["chat_template"])


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)
