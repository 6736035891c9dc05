"""Files of an encoder's folder, read before it is loaded: config.json, exported graphs, and those of
sentence-transformers on pooling, dense layers, normalisation, prompts and the longest text. Free of OpenVINO.

Where sentence-transformers has none, vectors are the mean over the tokens and are not normalised, as it does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.encoder.families import CLASSIFIER, EncoderSpec, is_encoder, num_labels, parse_encoder
from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.model_files import has_weights, read_json, read_json_if_any, read_json_value

_EXPORTED = ("onnx/model.onnx", "model.onnx", "openvino/openvino_model.xml", "openvino_model.xml")
"""Where Optimum and sentence-transformers put a graph."""
_EXPORTED_ENDINGS = ("Model", "ForMaskedLM", CLASSIFIER)
"""Of architectures that are no decoders."""


@dataclass(frozen=True, kw_only=True)
class EncoderOutline:
    spec: EncoderSpec | None
    """Of an architecture whose graph is built here; None: `graph_file` has it."""
    graph_file: Path | None = None
    max_tokens: int
    """Of a text, with its special tokens."""
    vocab_size: int
    num_labels: int | None
    """None: it gives vectors."""


def is_encoder_folder(folder: Path, settings: Mapping[str, Any]) -> bool:
    """`settings` is config.json."""
    return is_encoder(settings) or _exported(folder, settings) is not None


def outline_of(folder: Path, settings: Mapping[str, Any]) -> EncoderOutline:
    """Weights in safetensors of an architecture that is known here come first, then an exported graph. Raises
    UnsupportedError for what is neither."""
    graph_file = _exported(folder, settings)
    if graph_file is None or (is_encoder(settings) and has_weights(folder)):
        spec = parse_encoder(settings)
        labels = None if spec.classifier is None else spec.classifier.num_labels
        return EncoderOutline(spec=spec, max_tokens=spec.max_tokens, vocab_size=spec.vocab_size, num_labels=labels)
    try:
        return EncoderOutline(
            spec=None,
            graph_file=graph_file,
            max_tokens=parse_encoder(settings).max_tokens if is_encoder(settings) else _longest(settings),
            vocab_size=int(settings["vocab_size"]),
            num_labels=num_labels(settings) if _ends(settings, (CLASSIFIER,)) else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"config.json beside {graph_file.name} does not give {error}") from None


def _exported(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    if not _ends(settings, _EXPORTED_ENDINGS):
        return None
    return next((folder / name for name in _EXPORTED if (folder / name).is_file()), None)


def _ends(settings: Mapping[str, Any], endings: tuple[str, ...]) -> bool:
    names = settings.get("architectures")
    return any(str(name).endswith(endings) for name in (names if isinstance(names, list) else []))


def _longest(settings: Mapping[str, Any]) -> int:
    """ALBERT, DeBERTa and others call it so; GPT-2's relatives n_positions; nomic's n_positions, too."""
    return int(settings.get("max_position_embeddings") or settings["n_positions"])


_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which sentence-transformers concatenates several. Newer files name them as on the right."""
_ACTIVATIONS = {"Tanh": "tanh", "Identity": "", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}
"""Of Dense modules, by the last part of torch's name."""


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class SentenceRecipe:
    pooling: tuple[str, ...] = ("mean",)
    """Of several, the results are concatenated. None: each token keeps its vector (ColBERT)."""
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    """What goes before a text for which the caller names no prompt."""


def makes_vectors(folder: Path) -> bool:
    """Whether a model's folder is one of an embedding or ranking model. False where it cannot be read."""
    if (folder / "modules.json").is_file():
        return True
    try:
        return is_encoder_folder(folder, read_json(folder / "config.json"))
    except PenstockError:
        return False


def read_recipe(folder: Path) -> SentenceRecipe:
    """Raises UnsupportedError for a module that is not offered, EngineError for a file that cannot be read."""
    try:
        return _recipe(folder)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(f"the files of sentence-transformers in {folder.name} are damaged: {error!r}") from None


def _recipe(folder: Path) -> SentenceRecipe:
    limits = read_json_if_any(folder / "sentence_bert_config.json")
    said = read_json_if_any(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (said.get("prompts") or {}).items()}
    for name in ("query", "document"):  # of models with a vector for each token
        if said.get(f"{name}_prefix"):
            prompts.setdefault(name, str(said[f"{name}_prefix"]))
    recipe: dict[str, Any] = {
        "max_tokens": limits.get("max_seq_length"),
        "lower_case": bool(limits.get("do_lower_case")),
        "prompts": prompts,
        "default_prompt": prompts.get(said.get("default_prompt_name") or "", ""),
    }
    dense: list[DenseLayer] = []
    modules = _modules(folder)
    if modules:
        recipe["pooling"] = ()
    for module in modules:
        kind, path = str(module["type"]).rpartition(".")[2], folder / str(module["path"])
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UnsupportedError(f"modules.json names {module['path']}, which is not in the model's folder")
        if recipe.get("normalize"):
            raise UnsupportedError(f"modules.json has {kind} after Normalize, which is not supported")
        if kind == "Pooling":
            recipe["pooling"] = _pooling(read_json(path / "config.json"), any(prompts.values()))
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            recipe["normalize"] = True
        elif kind != "Transformer":
            raise UnsupportedError(f"modules.json has {kind}; supported are Transformer, Pooling, Dense and Normalize")
    if recipe.get("pooling") == ():
        recipe["normalize"] = True  # by ColBERT itself: no module says so
    return SentenceRecipe(dense=tuple(dense), **recipe)


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / "modules.json"
    return msgspec.convert(read_json_value(path), list[dict[str, Any]]) if path.is_file() else []


def _pooling(settings: Mapping[str, Any], has_prompts: bool) -> tuple[str, ...]:
    if settings.get("include_prompt") is False and has_prompts:
        raise UnsupportedError("1_Pooling/config.json leaves the prompt out of the pooling, which is not supported")
    mode_or_modes = settings.get("pooling_mode")
    modes = [mode_or_modes] if isinstance(mode_or_modes, str) else list(mode_or_modes or ())
    modes = modes or [mode for key, mode in _MODES.items() if settings.get(key)]
    if not modes or not set(modes) <= set(_MODES.values()):
        raise UnsupportedError(f"the pooling {modes} is not supported; supported are {', '.join(_MODES.values())}")
    return tuple(modes)


def _dense(folder: Path) -> DenseLayer:
    settings = read_json(folder / "config.json")
    name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{folder.name} has the activation {name}; supported are {', '.join(_ACTIVATIONS)}")
    return DenseLayer(
        folder=folder,
        in_features=settings["in_features"],
        out_features=settings["out_features"],
        bias=bool(settings.get("bias", True)),
        activation=_ACTIVATIONS[name],
    )
