"""Safetensors checkpoints, memory-mapped: one file, or shards with an index."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.engines.errors import EngineError
from penstock.engines.formats.model_files import weight_files
from penstock.engines.formats.safetensors_file import StoredTensor, read_safetensors


def full_name(name: str) -> str:
    """Of a decoder's tensor. Embedding models, saved without a head, leave out the beginning."""
    return "model." + name if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


class Checkpoint:
    """Tensors by name. The mapping lives as long as the arrays that look into it."""

    def __init__(self, model_dir: Path, rename: Callable[[str], str | None] = lambda name: name) -> None:
        """`rename`: what a tensor of the files is called here; None: it is left out."""
        self._tensors: dict[str, StoredTensor] = {}
        self._maps: list[mmap.mmap] = []
        for path in weight_files(model_dir):
            tensors, mapping = read_safetensors(path, lambda name: rename(name) is not None)
            self._maps.append(mapping)
            self._tensors.update((rename(name) or name, tensor) for name, tensor in tensors.items())

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
