"""What guesses for the model of the openvino runner: a second decoder, or a draft head. Both have a KV cache of the
same blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.engines.contract.loading import Report
from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.formats.draft_heads import is_eagle3
from penstock.engines.formats.exported_graph import exported_graph
from penstock.engines.formats.model_files import read_json
from penstock.engines.kit.draft_model import DraftModel, HeadInputs
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.draft_head import DraftHead, open_eagle3, open_mtp
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.loaded_decoder import LoadedDecoder, load_decoder, load_files


def open_drafts(config: OpenVINOConfig, report: Report) -> DraftHead | None:
    """The draft head that the settings name; None: they name none. Of a draft model only config.json is read. Raises
    UnsupportedError where either does not go with the model."""
    if not _drafts(config):
        return None
    config = _without_large_steps(config)
    with _blamed_on_setting(config):
        _check_not_exported("the model", config.model_dir)
    settings = read_json(config.model_dir / "config.json")
    target = parse_config(settings, config.max_model_len)
    with _blamed_on_setting(config):
        _check_windows("the model", target)
        if config.draft_model_dir is None:
            return open_mtp(config, settings, target, report)
        _check_not_exported("the draft model", config.draft_model_dir)
        settings = read_json(config.draft_model_dir / "config.json")
        if is_eagle3(settings):
            return open_eagle3(config, config.draft_model_dir, settings, target, report)
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
        draft = load_files(head.config, head.files, report) if head else _load_draft_model(config, report)
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
    return DraftModel(decoder.model, decoder.block_size, num_blocks, decoder.model_len, max_tokens, inputs)


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


def _load_draft_model(config: OpenVINOConfig, report: Report) -> LoadedDecoder:
    assert config.draft_model_dir is not None
    settings = replace(
        _without_large_steps(config),
        model_dir=config.draft_model_dir,
        draft_model_dir=None,
        max_model_len=None,
        adapters={},
        max_loras=0,
    )
    return load_decoder(settings, report)


def _without_large_steps(config: OpenVINOConfig) -> OpenVINOConfig:
    """A draft computes a few tokens of each request, and keeps its weights once."""
    return replace(config, activations="int8") if config.activations == "mixed" else config


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
