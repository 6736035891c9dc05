"""Small encoders for tests: transformers classes with random weights beside a WordPiece tokenizer."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openvino as ov
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from penstock.engines.encoder.text import TokenizedText, Vectors
from support.tokenizers import bert

torch.set_num_threads(1)

_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "Camembert": {"type_vocab_size": 1, "pad_token_id": 1},
    "Electra": {"embedding_size": 16},
    "DistilBert": _DISTIL,
    "MPNet": {"pad_token_id": 1},
    "ModernBert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
}
"""By the beginning of the classes' names: what the config says beyond the common shape."""
_EXPORTED_ONLY: dict[str, dict[str, Any]] = {"Albert": {"embedding_size": 16}}
"""Families that run from an exported graph alone."""


def make_encoder(
    folder: Path, family: str = "Bert", *, labels: int = 0, files: dict[str, Any] | None = None, **overrides: Any
) -> Path:
    """Saves a model and a tokenizer in `folder`, which is returned. `labels` above 0: a classifier of so many. `files`
    are JSON files of sentence-transformers by their path."""
    torch.manual_seed(3)
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}{'ForSequenceClassification' if labels else 'Model'}")
    differences = (FAMILIES | _EXPORTED_ONLY)[family] | ({"num_labels": labels} if labels else {})
    model = model_class(config_class(**{**_SHAPE, **differences, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # a fresh model's vectors are all alike
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content))
        if "in_features" in content and not content["bias"]:
            weight = torch.randn(content["out_features"], content["in_features"])
            save_file({"linear.weight": weight}, (folder / path).with_name("model.safetensors"))
    return folder


def sentence_files(mode: str = "mean_tokens", *, normalize: bool = True, max_tokens: int = 64) -> dict[str, Any]:
    """As sentence-transformers writes them."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    return {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, f"pooling_mode_{mode}": True},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
    }


def token_files() -> dict[str, Any]:
    """As PyLate writes them for a ColBERT: a vector for each token."""
    dense = {"in_features": 32, "out_features": 8, "bias": False}
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ],
        "1_Dense/config.json": dense | {"activation_function": "torch.nn.modules.linear.Identity"},
        "config_sentence_transformers.json": {"query_prefix": "what ", "document_prefix": "rain "},
    }


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bert(), pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def reference(folder: Path) -> PreTrainedModel:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = AutoModelForSequenceClassification if "Classification" in architecture else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_rows(model: PreTrainedModel, texts: list[TokenizedText], mode: str = "mean") -> Vectors:
    """What transformers gives, each text by itself: logits, or hidden states pooled by `mode`."""
    return np.stack([_row(model, text, mode) for text in texts])


def _row(model: PreTrainedModel, text: TokenizedText, mode: str) -> Any:
    given = {"input_ids": torch.tensor([list(text.ids)])}
    if text.types is not None and getattr(model.config, "type_vocab_size", 0) > 1:
        given["token_type_ids"] = torch.tensor([list(text.types)])
    with torch.no_grad():
        found = model(**given)
    if "logits" in found:
        return found.logits[0].numpy()
    hidden = found.last_hidden_state[0]
    weights = torch.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.max(0).values,
        "mean": lambda: hidden.mean(0),
        "mean_tokens": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean_tokens": lambda: (hidden * weights).sum(0) / weights.sum(),
    }[mode]()
    return pooled.numpy()


def export_graph(folder: Path, kind: str) -> Path:
    """Puts a graph of the model in `folder` beside its weights, where Optimum would: "onnx" or "openvino". Its path."""
    model, ids = reference(folder), torch.full((2, 7), 5)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    if getattr(model.config, "type_vocab_size", 0) < 2:
        del given["token_type_ids"]
    [output] = {"logits", "last_hidden_state"} & set(model(**given))
    traced = _Traced(model, list(given), output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both trace, which torch no longer likes; what is newer needs more packages
        return (_export_openvino if kind == "openvino" else _export_onnx)(folder, traced, given, output)


def _export_openvino(folder: Path, traced: torch.nn.Module, given: dict[str, torch.Tensor], output: str) -> Path:
    with mock.patch.dict(os.environ, CI="true"):  # else it reports to its maker, from forks of this large process
        graph = ov.convert_model(traced, example_input=tuple(given.values()))
    for port, name in zip(graph.inputs, given, strict=True):
        port.set_names({name})
    graph.output(0).set_names({output})
    path = folder / "openvino" / "openvino_model.xml"
    ov.save_model(graph, path, compress_to_fp16=False)
    return path


def _export_onnx(folder: Path, traced: torch.nn.Module, given: dict[str, torch.Tensor], output: str) -> Path:
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in given}
    torch.onnx.export(
        traced,
        tuple(given.values()),
        path,
        input_names=list(given),
        output_names=[output],
        dynamic_axes=axes | {output: {0: "batch"} | ({} if output == "logits" else {1: "length"})},
        dynamo=False,
    )
    return path


class _Traced(torch.nn.Module):
    """Takes what an exporter gives: tensors in an order."""

    def __init__(self, model: PreTrainedModel, inputs: list[str], output: str) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.output = output

    def forward(self, *given: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.inputs, given, strict=True)))[self.output]
