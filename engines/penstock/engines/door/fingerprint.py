"""Whether two sides mean the same model, and whether two engines would give the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.spec import ModelDigests
from penstock.engines.host.content_digest import content_digest
from penstock.engines.registry import EngineSpec

_VOCABULARY = {"config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"}
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".xml"}
_OF_THE_MACHINE = {"model_dir", "draft_model_dir", "threads", "num_blocks", "kv_cache_memory", "memory_share"}
_OF_THE_MACHINE |= {"device", "weights_cache", "adapters", "max_loras", "faults", "latency", "max_num_seqs"}
_OF_THE_MACHINE |= {"max_num_batched_tokens", "max_steps_in_flight"}
"""Options of runners that change neither what the tokens are nor how they are hashed."""


def model_digests(folder: Path) -> ModelDigests:
    """Raises OSError."""
    paths = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name)
    vocabulary = [path for path in paths if path.name in _VOCABULARY or path.suffix == ".tiktoken"]
    weights = [path for path in paths if path.suffix in _WEIGHTS]
    return ModelDigests(_digest(vocabulary), _digest(weights) if weights else "")


def _digest(paths: Iterable[Path]) -> str:
    known = [(path.name, content_digest(path)) for path in paths]
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def engine_fingerprint(spec: EngineSpec, info: ModelInfo, model: ModelDigests) -> str:
    """Of the model, the engine, its settings and its number types. Engines with the same one give the same greedy
    tokens, as far as their kernels do, and hash the same prompt to the same blocks."""
    options = {name: value for name, value in spec.options.items() if name not in _OF_THE_MACHINE}
    engine = (model, spec.runner, spec.scheduling, options)
    parts = (*engine, info.numerics, info.vocab_size, info.kv_groups, info.eos_token_ids)
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()
