"""The encoder architectures that can be run, and how each is read from config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino.rope import Rope, parse_ropes_of_layer_types


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec:
    """The layers behind the encoder that give logits."""

    num_labels: int
    pooling: Literal["cls", "mean"] = "cls"
    dense: str
    """The layer before the last one."""
    dense_bias: bool = True
    activation: str = "tanh"
    norm: str = ""
    """After the activation; "" for none."""
    norm_bias: bool = True
    out: str = "classifier"


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    max_tokens: int
    """Of a text, with its special tokens."""
    embedding_size: int
    """Of the token, position and type tables."""
    position_rows: int = 0
    """Rows of the table of positions; 0: there is none."""
    first_position: int = 0
    """Row of a text's first token."""
    type_rows: int = 0
    """Rows of the table of token types; 0: there is none."""
    distance_buckets: int = 0
    """Attention is biased by a table with a row for each bucket of distances; 0: it is not."""
    rotary: RotarySpec | None = None
    """Of ModernBERT: rotary positions, norms before each part, a gate in the MLP."""
    rename: Callable[[str], str | None]
    """From a checkpoint's names to the graph's; None for tensors that no part of the model uses."""
    classifier: ClassifierSpec | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    ropes: tuple[Rope, ...]
    """Of each layer."""
    windows: tuple[int, ...]
    """Of each layer: a token attends to those at most so far away; 0: to all."""
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool


Settings = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

CLASSIFIER = "ForSequenceClassification"
_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
_OF_THE_TRAINING = ("cls.", "lm_head.", "decoder.", "discriminator_predictions.", "generator_", "vocab_")
_OFCLASSIFIERS = ("pooler.", "head.", "classifier.", "pre_classifier.")
"""Tensors with such names give no vectors."""
_BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
_OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    prefix: str
    """Of the encoder's tensors in a checkpoint that has a head as well."""
    names: tuple[tuple[str, str], ...] = ()
    """From this family's names of tensors to BERT's: patterns and what replaces them."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names of settings that BERT's config.json calls otherwise, by BERT's name."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reserved_positions: Callable[[Settings], int] = lambda c: 0
    """Rows of the table of positions before that of a text's first token."""
    type_rows: Callable[[Settings], int] = lambda c: c["type_vocab_size"]
    distance_buckets: Callable[[Settings], int] = lambda c: 0
    rotary: Callable[[Settings], RotarySpec] | None = None
    classifier: Callable[[Settings], dict[str, Any]]


def _after_padding(c: Settings) -> int:
    """RoBERTa counts positions from the one behind the padding token's id."""
    return int(c["pad_token_id"]) + 1


def _modernbert_rotary(c: Settings) -> RotarySpec:
    layers = c["num_hidden_layers"]
    kinds = c.get("layer_types") or [
        "sliding_attention" if n % c["global_attn_every_n_layers"] else "full_attention" for n in range(layers)
    ]
    if len(kinds) != layers or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        raise UnsupportedError("layer_types is not understood: each layer has full_attention or sliding_attention")
    ropes = parse_ropes_of_layer_types(
        c,
        c["hidden_size"] // c["num_attention_heads"],
        {
            "full_attention": {"rope_theta": c["global_rope_theta"]},
            "sliding_attention": {"rope_theta": c["local_rope_theta"]},
        },
    )
    return RotarySpec(
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=tuple(c["local_attention"] // 2 if kind == "sliding_attention" else 0 for kind in kinds),
        norm_bias=bool(c["norm_bias"]),
        attention_bias=bool(c["attention_bias"]),
        mlp_bias=bool(c["mlp_bias"]),
    )


def _own_dense(c: Settings) -> dict[str, Any]:
    return {"dense": "classifier.dense", "out": "classifier.out_proj"}


_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
"""What config.json means where it is silent."""
_ROBERTA = EncoderFamily(
    prefix="roberta.",
    defaults=_SIZES | {"vocab_size": 50265, "pad_token_id": 1, "layer_norm_eps": 1e-5},
    reserved_positions=_after_padding,
    classifier=_own_dense,
)

FAMILIES: dict[str, EncoderFamily] = {
    "Bert": EncoderFamily(prefix="bert.", defaults=_SIZES, classifier=lambda c: {"dense": "pooler.dense"}),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "Electra": EncoderFamily(
        prefix="electra.",
        defaults=_SIZES
        | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        classifier=lambda c: _own_dense(c) | {"activation": "gelu"},
    ),
    "DistilBert": EncoderFamily(
        prefix="distilbert.",
        names=(
            (r"^transformer\.layer\.", "encoder.layer."),
            (r"\.attention\.q_lin\.", ".attention.self.query."),
            (r"\.attention\.k_lin\.", ".attention.self.key."),
            (r"\.attention\.v_lin\.", ".attention.self.value."),
            (r"\.attention\.out_lin\.", ".attention.output.dense."),
            (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
            (r"\.ffn\.lin1\.", ".intermediate.dense."),
            (r"\.ffn\.lin2\.", ".output.dense."),
            (r"\.output_layer_norm\.", ".output.LayerNorm."),
        ),
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        defaults=_SIZES | {"num_hidden_layers": 6},
        type_rows=lambda c: 0,
        classifier=lambda c: {"dense": "pre_classifier", "activation": "relu"},
    ),
    "MPNet": EncoderFamily(
        prefix="mpnet.",
        names=(
            (r"\.attention\.attn\.q\.", ".attention.self.query."),
            (r"\.attention\.attn\.k\.", ".attention.self.key."),
            (r"\.attention\.attn\.v\.", ".attention.self.value."),
            (r"\.attention\.attn\.o\.", ".attention.output.dense."),
            (r"\.attention\.LayerNorm\.", ".attention.output.LayerNorm."),
        ),
        defaults=_SIZES | {"vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32},
        reserved_positions=_after_padding,
        type_rows=lambda c: 0,
        distance_buckets=lambda c: c["relative_attention_num_buckets"],
        classifier=_own_dense,
    ),
    "ModernBert": EncoderFamily(
        prefix="model.",
        keys={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        defaults=_SIZES
        | {
            "vocab_size": 50368,
            "num_hidden_layers": 22,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "global_attn_every_n_layers": 3,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "classifier_pooling": "cls",
            "classifier_bias": False,
            "classifier_activation": "gelu",
        },
        type_rows=lambda c: 0,
        rotary=_modernbert_rotary,
        classifier=lambda c: {
            "pooling": c["classifier_pooling"],
            "dense": "head.dense",
            "dense_bias": c["classifier_bias"],
            "activation": ACTIVATIONS.get(c["classifier_activation"], ""),
            "norm": "head.norm",
            "norm_bias": c["norm_bias"],
        },
    ),
}

_REFUSED = {"quantization_config": "quantized checkpoints", "is_decoder": "decoders made of encoders"}


def is_encoder(settings: Settings) -> bool:
    """Whether config.json names an architecture that is run here."""
    return _architecture(settings) is not None


def parse_encoder(settings: Settings) -> EncoderSpec:
    """`settings` is config.json. Raises UnsupportedError, naming what is not supported and what is."""
    family_and_ending = _architecture(settings)
    if family_and_ending is None:
        raise UnsupportedError(
            f"architecture {settings.get('architectures')} is no encoder of these: {', '.join(FAMILIES)}"
        )
    for key, meaning in _REFUSED.items():
        if settings.get(key):
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    if settings.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedError(f"position_embedding_type={settings['position_embedding_type']!r} is not supported")
    family, ending = family_and_ending
    renamed = {bert: settings[own] for bert, own in family.keys.items() if own in settings}
    c = {key: value for key, value in {**settings, **renamed}.items() if value is not None}
    c = {**family.defaults, **c}
    check_model_sizes(c)
    return _spec(family, c, classifies=ending == CLASSIFIER)


def _architecture(settings: Settings) -> tuple[EncoderFamily, str] | None:
    names = settings.get("architectures")
    for name in names if isinstance(names, list) else []:
        for ending in _ENDINGS:
            family = FAMILIES.get(str(name).removesuffix(ending))
            if family is not None and str(name).endswith(ending):
                return family, ending
    return None


def _spec(family: EncoderFamily, c: Settings, *, classifies: bool) -> EncoderSpec:
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    if not heads or hidden % heads:
        raise UnsupportedError(f"hidden_size {hidden} is not divided by {heads} attention heads")
    rotary = None if family.rotary is None else family.rotary(c)
    reserved = family.reserved_positions(c)
    return EncoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=hidden,
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        norm_eps=float(c["layer_norm_eps"]),
        activation=_activation(c["hidden_act"]),
        max_tokens=c["max_position_embeddings"] - reserved,
        embedding_size=c.get("embedding_size") or hidden,
        position_rows=0 if rotary is not None else c["max_position_embeddings"],
        first_position=reserved,
        type_rows=family.type_rows(c),
        distance_buckets=family.distance_buckets(c),
        rotary=rotary,
        rename=_renaming(family, classifies=classifies),
        classifier=ClassifierSpec(num_labels=num_labels(c), **family.classifier(c)) if classifies else None,
    )


def _activation(name: object) -> str:
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[str(name)]


def num_labels(c: Settings) -> int:
    """As transformers counts them."""
    labels = c.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else int(c.get("num_labels") or 2)


def _renaming(family: EncoderFamily, *, classifies: bool) -> Callable[[str], str | None]:
    patterns = [(re.compile(pattern), text) for pattern, text in (*_OLD_NAMES, *family.names)]
    unused = _OF_THE_TRAINING + (() if classifies else _OFCLASSIFIERS)

    def rename(name: str) -> str | None:
        name = name.removeprefix(family.prefix)
        if name.startswith(unused) or name.endswith(_BUFFERS):
            return None
        for pattern, text in patterns:
            name = pattern.sub(text, name)
        return name

    return rename
