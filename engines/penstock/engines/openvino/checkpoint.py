"""Safetensors checkpoints, memory-mapped: one file, or shards with an index.

Only safetensors are read: the other formats of the field are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.safetensors_file import StoredTensor, read_safetensors


class Checkpoint:
    """Tensors by name. The mapping lives as long as the arrays that look into it."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self._maps: list[mmap.mmap] = []
        for path in _weight_files(model_dir):
            tensors, mapping = read_safetensors(path)
            self._maps.append(mapping)
            self._tensors.update(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(len(tensor.data) for tensor in self._tensors.values())

    def release_pages(self) -> None:
        """Gives the memory behind the mapping back to the system; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapping in self._maps:
                mapping.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(f"the checkpoint has no tensor {name}") from None


def _weight_files(model_dir: Path) -> list[Path]:
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in model_dir.glob(pattern)]
        found = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise UnsupportedError(f"no model.safetensors in {model_dir}: weights are read from safetensors only{found}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EngineError(f"{index.name} is damaged: {e!r}") from e
    if outside:
        raise EngineError(f"{index.name} names a file outside its folder: {outside[0]}")
    return [model_dir / name for name in names]
