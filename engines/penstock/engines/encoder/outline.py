"""What can be told of an encoder before it is loaded: from config.json and the names of its files. Free of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.encoder.families import CLASSIFIER, is_encoder, num_labels, parse_encoder
from penstock.engines.encoder.spec import EncoderSpec
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_files import has_weights

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
