"""GGUF files out of Hugging Face's folders, by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from support.gguf_settings import write_settings, write_value
from support.gguf_tensors import architecture_of, converted_tensors, fused_experts

Kind = Callable[[str], str]
"""The block format of a tensor, by the name that Hugging Face gives it."""

_KINDS_OF_TOKENS = {True: 3, False: 1}


def write_gguf(
    folder: Path, path: Path, kind: Kind = lambda name: "F32", parts: int = 1, fused: bool = False, **metadata: Any
) -> Path:
    """The model of `folder` in one file, or in `parts` of which `path` is the first; `metadata`, with `__` for a dot,
    is added to what is said or takes its place. `fused`: experts have their first two matrices in one. Returns
    `path`."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"].removesuffix("_text")
    name = architecture_of(family, config)
    converted = converted_tensors(folder, family, config)
    tensors = list((fused_experts(converted) if fused else converted).items())
    size = -(-len(tensors) // parts)
    for number in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.name[:-20]}-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(file, name)
        if number == 0:
            write_settings(writer, family, config)
            _write_activations(writer, folder)
            _write_tokenizer(writer, folder)
            for key, value in metadata.items():
                write_value(writer, key.replace("__", "."), value)
        for tensor, (original, values) in tensors[number * size : (number + 1) * size]:
            plain = values.ndim == 1 or tensor.endswith(".bias")
            quantized = GGMLQuantizationType["F32" if plain else kind(original)]
            writer.add_tensor(tensor, quantize(values, quantized), raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _write_activations(writer: gguf.GGUFWriter, folder: Path) -> None:
    """What Apertus has learned of each layer's."""
    stored = load_file(folder / "model.safetensors")
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        layers = sum(key.endswith(f".act_fn.{name}") for key in stored)
        values = [float(stored[f"model.layers.{n}.mlp.act_fn.{name}"].reshape(())) for n in range(layers)]
        if values:
            write_value(writer, f"xielu.{name}", values)


def round_weights(folder: Path, kind: Kind) -> None:
    """Gives the model of `folder` the matrices that its file in these formats holds."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, values in weights.items():
        if values.ndim == 2:
            quantized = GGMLQuantizationType[kind(name)]
            weights[name] = dequantize(quantize(values, quantized), quantized)
    save_file(weights, file, {"format": "pt"})


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
