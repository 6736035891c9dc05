"""GGUF files out of Hugging Face's folders, by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KINDS_OF_TOKENS = {True: 3, False: 1}


def write_gguf(folder: Path, path: Path, kind: Kind = lambda name: "F32", parts: int = 1, **metadata: Any) -> Path:
    """The model of `folder` in one file, or in `parts` of which `path` is the first; `metadata`, with `__` for a dot,
    is added to what is said or takes its place. Returns `path`."""
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"].removesuffix("_text")
    tensors = list(_tensors(folder, name, config).items())
    size = -(-len(tensors) // parts)
    for number in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.name[:-20]}-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(file, name)
        if number == 0:
            _write_settings(writer, name, config, folder)
            for key, value in metadata.items():
                _write_value(writer, key.replace("__", "."), value)
        for tensor, (original, values) in tensors[number * size : (number + 1) * size]:
            quantized = GGMLQuantizationType["F32" if values.ndim == 1 else kind(original)]
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


def _tensors(folder: Path, name: str, config: dict[str, Any]) -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
    names = _NAMES | (_GEMMA_NAMES if name == "gemma3" else {})
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for original, stored in read_safetensors(folder / "model.safetensors")[0].items():
        values = stored.f32()
        part, _, kind = original.rpartition(".")
        _, layers, rest = part.partition("model.layers.")
        number, _, rest = rest.partition(".")
        renamed = f"blk.{number}.{names[rest]}" if layers else whole[part]
        if name == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if rest[-6] == "q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if name == "gemma3" and part.endswith("norm"):
            values = values + 1
        found[f"{renamed}.{kind}"] = (original, np.ascontiguousarray(values, np.float32))
    factors = _rope_factors(config)
    return found if factors is None else found | {"rope_freqs.weight": ("", factors)}


def _rope_factors(config: dict[str, Any]) -> npt.NDArray[np.float32] | None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _write_settings(writer: gguf.GGUFWriter, name: str, config: dict[str, Any], folder: Path) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _write_tokenizer(writer, folder)


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
