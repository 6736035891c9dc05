"""Whether two sides mean the same model, and whether two engines would give the same tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.registry import EngineSpec

_WHOLE_FILE = 16 << 20
_SAMPLE = 1 << 16
"""Bytes at each of three places of a larger file."""
_SUFFIXES = {".json", ".safetensors", ".gguf", ".model", ".txt", ".bin", ".xml", ".jinja", ".tiktoken"}
_NOT_THE_MODEL = {"generation_config.json", "README.txt"}
_OF_THE_MACHINE = {"model_dir", "draft_model_dir", "threads", "num_blocks", "kv_cache_memory", "memory_share"}
_OF_THE_MACHINE |= {"device", "weights_cache", "adapters", "max_loras", "faults", "latency", "max_num_seqs"}
_OF_THE_MACHINE |= {"max_num_batched_tokens", "max_steps_in_flight"}
"""Options of runners that change neither what the tokens are nor how they are hashed."""


def model_digest(folder: Path) -> str:
    """Of a model's files: their names and sizes, small ones whole, of large ones the beginning, middle and end. Copies of
    a folder have the same digest. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.suffix in _SUFFIXES and path.name not in _NOT_THE_MODEL and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            _add(digest, path, size)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path, size: int) -> None:
    with path.open("rb") as file:
        if size <= _WHOLE_FILE:
            digest.update(file.read())
            return
        for place in (0, size // 2, size - _SAMPLE):
            file.seek(place)
            digest.update(file.read(_SAMPLE))


def engine_fingerprint(spec: EngineSpec, info: ModelInfo, model: str) -> str:
    """Of the model, the engine and its settings. Engines with the same one give the same greedy tokens, as far as their
    kernels do, and hash the same prompt to the same blocks."""
    options = {name: value for name, value in spec.options.items() if name not in _OF_THE_MACHINE}
    parts = (model, spec.runner, spec.scheduling, options, info.vocab_size, info.kv_groups, info.eos_token_ids)
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()
