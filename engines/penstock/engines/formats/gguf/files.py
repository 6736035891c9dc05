"""The GGUF files of a model's folder: one, or the parts that a large model was split into."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engines.errors import EngineError
from penstock.engines.formats.gguf.config import architecture_of, config_of
from penstock.engines.formats.gguf.container import GGUFFile, StoredBlocks, read_gguf
from penstock.engines.formats.gguf.tensors import BlockTensor, named_tensors
from penstock.engines.formats.quantized.mxfp4 import Mxfp4Tensor
from penstock.engines.formats.safetensors_file import StoredTensor

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_files(folder: Path) -> list[Path]:
    """Those in the folder; none where it has weights in safetensors."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*" + SUFFIX))


def all_parts(path: Path) -> list[Path]:
    """A file, or all of those that it is a part of, beside it. Raises EngineError where one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    if path not in parts:
        raise EngineError(f"{path.name} is not one of {len(parts)} parts")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise EngineError(f"{path.name} is one of {len(parts)} parts; there is no {missing[0]}")
    return parts


def read_parts(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, StoredBlocks], list[mmap.mmap]]:
    """Metadata, which the first part has, the tensors of all, and what they look into. Raises EngineError."""
    parts: list[GGUFFile] = [read_gguf(path) for path in paths]
    tensors: dict[str, StoredBlocks] = {}
    for path, part in zip(paths, parts, strict=True):
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            raise EngineError(f"{path.name} has a tensor {twice}, and so has a file beside it: they are not one model")
        tensors |= part.tensors
    return parts[0].metadata, tensors, [part.mapping for part in parts]


def read_tensors(paths: Sequence[Path]) -> tuple[dict[str, StoredTensor | BlockTensor | Mxfp4Tensor], list[mmap.mmap]]:
    """By their names in Hugging Face's layout. Raises EngineError."""
    metadata, tensors, mappings = read_parts(paths)
    return named_tensors(tensors, architecture_of(metadata, tensors), config_of(metadata, tensors)), mappings
