"""Drafts of the openvino runner: a second decoder that guesses for the model, or a draft head. Both have a KV cache of
the same blocks. A head is opened before the model is loaded, whose graph gives it features, and loaded afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engines.contract.loading import Report
from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.formats.model_files import exported_graph, read_json
from penstock.engines.formats.model_settings import has_mtp_head, is_eagle3
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.kit.batch import Ints
from penstock.engines.kit.cache_size import max_model_len
from penstock.engines.kit.draft_model import DraftModel, HeadInputs
from penstock.engines.openvino.checkpoint import MTP_LAYERS, Checkpoint, full_name
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import FeatureTap
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.draft_heads import build_eagle3, build_mtp, eagle3_name, parse_eagle3, read_token_ids
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.loading import (
    BuildGraph,
    BuiltDecoder,
    LoadedDecoder,
    built_decoder,
    load_decoder,
    open_built,
)
from penstock.engines.openvino.weights import Node, Weights, checkpoint_key

_FC = "fc.weight"
"""The matrix that makes features of hidden states. It is in the model's graph, so that a third of the numbers is kept.
"""


@dataclass(frozen=True)
class DraftHead:
    words: str
    """Its kind."""
    source: BuiltDecoder
    tap: FeatureTap
    """What it is given of the model."""
    token_ids: Ints | None = None
    """As `HeadInputs.token_ids`."""


def open_drafts(config: OpenVINOConfig, report: Report) -> DraftHead | None:
    """The draft head that the settings name; None: they name none. Of a draft model only config.json is read. Raises
    UnsupportedError where either does not go with the model."""
    if not _drafts(config):
        return None
    with _blamed_on_setting(config):
        _check_not_exported("the model", config.model_dir)
    settings = read_json(config.model_dir / "config.json")
    target = parse_config(settings, config.max_model_len)
    with _blamed_on_setting(config):
        _check_windows("the model", target)
        if config.draft_model_dir is None:
            return _open_mtp(config, settings, target, report)
        _check_not_exported("the draft model", config.draft_model_dir)
        settings = read_json(config.draft_model_dir / "config.json")
        if is_eagle3(settings):
            return _open_eagle3(config, config.draft_model_dir, settings, target, report)
        _check_draft_model(parse_config(settings), target)
    return None


def load_drafts(
    config: OpenVINOConfig, head: DraftHead | None, target: LoadedDecoder, report: Report
) -> LoadedDecoder | None:
    """`head`: what `open_drafts` gave. None where the settings name neither a head nor a draft model. Raises
    UnsupportedError for one that cannot be run beside the model."""
    if not _drafts(config):
        return None
    with _blamed_on_setting(config):
        if head is not None:
            source = head.source
        else:
            assert config.draft_model_dir is not None
            source = open_built(config, config.draft_model_dir, report, is_draft=True)
        draft = load_decoder(config, source, report)
        if draft.block_size != target.block_size:
            raise UnsupportedError(
                f"its KV cache has blocks of {draft.block_size} tokens, the model's of {target.block_size}"
            )
    return draft


def draft_model_of(
    decoder: LoadedDecoder, head: DraftHead | None, target: LoadedDecoder, num_blocks: int, max_tokens: int
) -> DraftModel:
    """With a KV cache of `num_blocks`, as the target has; `max_tokens`: most of a forward pass."""
    decoder.use_blocks(num_blocks)
    features = target.model.cache.features
    inputs = HeadInputs(features, head.token_ids) if head is not None and features is not None else None
    return DraftModel(decoder.model, decoder.block_size, num_blocks, decoder.source.model_len, max_tokens, inputs)


def _drafts(config: OpenVINOConfig) -> bool:
    return config.mtp or config.draft_model_dir is not None


@contextmanager
def _blamed_on_setting(config: OpenVINOConfig) -> Iterator[None]:
    """Errors name the setting that asks for guesses."""
    name, param = ("speculative=mtp", "speculative") if config.mtp else ("speculative-model", "speculative_model")
    try:
        yield
    except PenstockError as e:
        raise type(e)(f"{name}: {e.message}", param=param) from e


def _check_draft_model(draft: DecoderSpec, target: DecoderSpec) -> None:
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedError(f"its vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}")
    _check_windows("the draft model", draft)


def _check_windows(words: str, spec: DecoderSpec) -> None:
    if any(spec.windows):
        raise UnsupportedError(f"{words} has layers with sliding windows")


def _check_not_exported(words: str, folder: Path) -> None:
    if exported_graph(folder) is not None:
        raise UnsupportedError(f"{words} is one that OpenVINO's tools exported")


def _open_eagle3(
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
    source = _open_head(config, decoder, checkpoint, build, target, report)
    key = repr((spec.layers, checkpoint_key(source.numerics.weights, checkpoint)))
    tap = FeatureTap(spec.layers, decoder.hidden_size, partial(_combine, source.weights, shape), key)
    return DraftHead("EAGLE-3 head", source, tap, token_ids)


def _open_mtp(config: OpenVINOConfig, settings: Mapping[str, Any], target: DecoderSpec, report: Report) -> DraftHead:
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
    source = _open_head(config, decoder, checkpoint, build_mtp, target, report)
    return DraftHead("MTP head", source, FeatureTap((target.num_layers,), target.hidden_size))


def _open_head(
    config: OpenVINOConfig,
    decoder: DecoderSpec,
    checkpoint: Checkpoint,
    build: BuildGraph,
    target: DecoderSpec,
    report: Report,
) -> BuiltDecoder:
    model_len = max_model_len(config.max_model_len, target.max_position_embeddings)
    return built_decoder(
        config, decoder, checkpoint, build, model_len, report, is_draft=True, feature_width=decoder.hidden_size
    )


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
