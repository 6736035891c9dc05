"""The draft head of the openvino runner: it is opened before the model is loaded, whose graph gives it features, and
loaded afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engines.contract.loading import Report
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.draft_heads import has_mtp_head
from penstock.engines.formats.model_files import read_json
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.kit.batch import Ints
from penstock.engines.kit.cache_size import max_model_len
from penstock.engines.openvino.checkpoint import MTP_LAYERS, Checkpoint, full_name
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import FeatureTap
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.eagle3 import eagle3_name, parse_eagle3, read_token_ids
from penstock.engines.openvino.head_graphs import build_eagle3, build_mtp
from penstock.engines.openvino.loaded_decoder import DecoderFiles, with_weights_of
from penstock.engines.openvino.weights import Node, Weights, checkpoint_key, open_weights

_FC = "fc.weight"
"""The matrix that makes features of hidden states. It is in the model's graph, so that a third of the numbers is kept.
"""


@dataclass(frozen=True)
class DraftHead:
    words: str
    """What it is."""
    config: OpenVINOConfig
    files: DecoderFiles
    tap: FeatureTap
    """What it is given of the model."""
    token_ids: Ints | None = None
    """As `HeadInputs.token_ids`."""


def open_eagle3(
    config: OpenVINOConfig, folder: Path, settings: Mapping[str, Any], target: DecoderSpec, report: Report
) -> DraftHead:
    """`settings`: the head's config.json. Where its checkpoint has no embeddings, or no matrix for logits, it has the
    model's. Raises UnsupportedError for one that does not go with the model, EngineError for a broken one."""
    spec = parse_eagle3(settings, target, config.max_model_len)
    token_ids = read_token_ids(folder, spec)
    checkpoint = Checkpoint(folder, eagle3_name, parse_scheme(settings))
    decoder, names = spec.decoder, spec.decoder.names
    if names.embedding + ".weight" not in checkpoint:
        _borrow(checkpoint, names.embedding, config, target, target.names.embedding, decoder)
    if not decoder.tie_word_embeddings and names.head + ".weight" not in checkpoint:
        head = target.names.embedding if target.tie_word_embeddings else target.names.head
        _borrow(checkpoint, names.head, config, target, head, decoder)
    shape = decoder.hidden_size, len(spec.layers) * target.hidden_size
    if checkpoint[_FC].shape != shape:
        raise UnsupportedError(
            f"tensor {_FC} has shape {checkpoint[_FC].shape}, the layers in config.json need {shape}"
        )
    build = partial(
        build_eagle3, draft_vocab_size=spec.draft_vocab_size, norm_before_residual=spec.norm_before_residual
    )
    config = replace(with_weights_of(config, checkpoint), model_dir=folder, max_loras=0, adapters={})
    weights = open_weights(config, checkpoint, report)
    model_len = max_model_len(config.max_model_len, target.max_position_embeddings)
    files = DecoderFiles(decoder, (), model_len, checkpoint, weights, build, given=decoder.hidden_size)
    key = repr((spec.layers, checkpoint_key(config.weights, checkpoint)))
    tap = FeatureTap(spec.layers, decoder.hidden_size, partial(_combine, weights, shape), key)
    return DraftHead("EAGLE-3 head", config, files, tap, token_ids)


def open_mtp(config: OpenVINOConfig, settings: Mapping[str, Any], target: DecoderSpec, report: Report) -> DraftHead:
    """Of the model's own checkpoint; `settings`: its config.json. Raises UnsupportedError where there is none."""
    if not has_mtp_head(settings):
        raise UnsupportedError(f"no head of {str(settings['architectures'][0])[:50]} is supported; MiMo's is")
    count = settings.get("num_nextn_predict_layers")
    if count != 1:
        raise UnsupportedError(f"config.json has num_nextn_predict_layers={str(count)[:50]}; one layer is supported")
    names = replace(target.names, layers=MTP_LAYERS)
    decoder = replace(target, layers=target.layers[:1], names=names)
    shared = (names.embedding + ".weight", names.head + ".weight")

    def rename(name: str) -> str | None:
        return name if name in shared or name.startswith(f"{MTP_LAYERS}.0.") else None

    checkpoint = Checkpoint(config.model_dir, rename, parse_scheme(settings))
    config = replace(with_weights_of(config, checkpoint), max_loras=0, adapters={})
    weights = open_weights(config, checkpoint, report)
    model_len = max_model_len(config.max_model_len, target.max_position_embeddings)
    files = DecoderFiles(decoder, (), model_len, checkpoint, weights, build_mtp, given=decoder.hidden_size)
    return DraftHead("MTP head", config, files, FeatureTap((target.num_layers,), target.hidden_size))


def _combine(weights: Weights, shape: tuple[int, int], joined: Node) -> Node:
    return weights.project(joined, _FC, shape)


def _borrow(
    checkpoint: Checkpoint,
    name: str,
    config: OpenVINOConfig,
    target: DecoderSpec,
    target_name: str,
    decoder: DecoderSpec,
) -> None:
    if decoder.hidden_size != target.hidden_size:
        raise UnsupportedError(
            f"its checkpoint has no {name}.weight, and its hidden size of {decoder.hidden_size} is not the model's "
            f"{target.hidden_size}"
        )
    scheme = parse_scheme(read_json(config.model_dir / "config.json"))
    whole = Checkpoint(config.model_dir, full_name, scheme)
    checkpoint.borrow(name + ".weight", whole, target_name + ".weight")
