"""The draft model of the openvino runner: a second decoder, with a KV cache of the same blocks."""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.contract.loading import Report
from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.formats.model_files import read_json
from penstock.engines.kit.draft_model import DraftModel
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.loaded_decoder import LoadedDecoder, load_decoder


def check_draft_model(config: OpenVINOConfig) -> None:
    """Reads no weights. Raises UnsupportedError where the draft model that the settings name does not go with the
    model."""
    if config.draft_model_dir is None:
        return
    spec = parse_config(read_json(config.model_dir / "config.json"), config.max_model_len)
    try:
        draft = parse_config(read_json(config.draft_model_dir / "config.json"))
    except PenstockError as e:
        raise _of_draft_model(e) from e
    if draft.vocab_size != spec.vocab_size:
        raise _refused(f"its vocabulary has {draft.vocab_size} tokens, the model's {spec.vocab_size}")
    for words, each in (("the draft model", draft), ("the model", spec)):
        if _has_windows(each):
            raise _refused(f"{words} has layers with sliding windows")


def load_draft_model(config: OpenVINOConfig, target: LoadedDecoder, report: Report) -> LoadedDecoder | None:
    """None where the settings name none. Raises UnsupportedError for one that cannot be run beside the model."""
    if config.draft_model_dir is None:
        return None
    settings = replace(
        config,
        model_dir=config.draft_model_dir,
        draft_model_dir=None,
        max_model_len=None,
        adapters={},
        max_loras=0,
    )
    try:
        draft = load_decoder(settings, report)
    except PenstockError as e:
        raise _of_draft_model(e) from e
    if draft.block_size != target.block_size:
        raise _refused(f"its KV cache has blocks of {draft.block_size} tokens, the model's of {target.block_size}")
    return draft


def draft_model_of(decoder: LoadedDecoder, num_blocks: int, max_tokens: int) -> DraftModel:
    """With a KV cache of `num_blocks`; `max_tokens`: most of a forward pass."""
    decoder.use_blocks(num_blocks)
    return DraftModel(decoder.model, decoder.block_size, num_blocks, decoder.model_len, max_tokens)


def _has_windows(spec: DecoderSpec) -> bool:
    return any(spec.sliding_windows)


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(f"speculative-model: {reason}", param="speculative_model")


def _of_draft_model(error: PenstockError) -> PenstockError:
    return type(error)(f"speculative-model: {error.message}", param="speculative_model")
