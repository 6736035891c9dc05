"""Checkpoints, memory-mapped: safetensors or GGUF, in one file or in several, quantized or not."""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.files import gguf_files, read_tensors
from penstock.engines.formats.gguf.tensors import BlockTensor, JoinedHeads
from penstock.engines.formats.model_files import weight_files
from penstock.engines.formats.model_settings import text_name
from penstock.engines.formats.quantized.bitsandbytes import CodebookTensor
from penstock.engines.formats.quantized.integers import IntegerTensor
from penstock.engines.formats.quantized.mxfp4 import Mxfp4Tensor
from penstock.engines.formats.quantized.schemes import QuantizedTensor, Scheme
from penstock.engines.formats.safetensors_file import StoredTensor, read_safetensors
from penstock.engines.host.content_digest import content_digest, file_state
from penstock.engines.openvino.numerics import StoredTypes

Tensor = StoredTensor | BlockTensor | JoinedHeads | QuantizedTensor

_BYTE = 8
_MASKS = re.compile(r".*\.(attn|attention)\.(masked_)?bias")
"""Of GPT-2 and GPT-NeoX, saved with older checkpoints."""


MTP_LAYERS = "model.mtp_layers"
"""Of MiMo's draft head, in the same files."""
MTP_OF_QWEN = "mtp."
"""Before the names of Qwen's, in the same files."""

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")
"""Of GPT-OSS; blocks and scales are MXFP4."""
_STACKED_GRANITE = re.compile(r"(.*\.block_sparse_moe)\.(input_linear|output_linear)\.weight")

_NORMS_OF_OLMO_HYBRID = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
"""Transformers reads both, and writes the first."""


def full_name(name: str) -> str | None:
    """Of a decoder's tensor; None for one that says nothing, or that is part of something else. Models that were saved
    without a head leave out the beginning."""
    inner = text_name(name)
    if inner is None:
        return None
    name = inner
    if name.startswith(("embed_tokens.", "layers.", "norm.")):
        return "model." + name
    for stored, usual in _NORMS_OF_OLMO_HYBRID.items():
        name = name.replace(stored, usual)
    if _MASKS.fullmatch(name) or name.startswith((MTP_LAYERS + ".", MTP_OF_QWEN)):
        return None
    return "transformer." + name if name.startswith(("h.", "wte.", "wpe.", "ln_f.", "word_embeddings")) else name


def _each_expert(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Of a tensor that has all experts of a layer, each with a name of its own; else the tensor as it is."""
    names = _names_of_stacked(name)
    if names is None or not tensor.shape or not tensor.data.size:
        yield name, tensor
        return
    experts, part = names
    for number, data in enumerate(np.split(tensor.data, tensor.shape[0])):
        yield f"{experts}.{number}.{part}", StoredTensor(tensor.dtype, tensor.shape[1:], data)


def _names_of_stacked(name: str) -> tuple[str, str] | None:
    """What stands before an expert's number, and behind it."""
    if (match := _STACKED.fullmatch(name)) is not None:
        return match[1], f"{match[2]}.{match[3] or 'weight'}"
    if (match := _STACKED_GRANITE.fullmatch(name)) is not None:
        return f"{match[1]}.experts", f"{match[2]}.weight"
    return None


class Checkpoint:
    """Tensors by name. The mapping lives as long as the arrays that look into it."""

    def __init__(
        self, model_dir: Path, rename: Callable[[str], str | None] = lambda name: name, scheme: Scheme | None = None
    ) -> None:
        """`rename`: what a tensor of the files is called here; None: it is left out. `scheme`: of a quantized
        checkpoint."""
        self.scheme = scheme
        self._tensors: dict[str, Tensor] = {}
        self._maps: list[mmap.mmap] = []
        self._lenders: dict[str, Checkpoint] = {}
        gguf = gguf_files(model_dir)
        self._states = {path: file_state(path) for path in gguf or weight_files(model_dir)}
        """Before they are read."""
        if gguf:
            tensors, self._maps = read_tensors(gguf)
            self._tensors.update((rename(name) or name, tensor) for name, tensor in tensors.items())
            return
        tensors_of_files: dict[str, StoredTensor] = {}
        for path in self._states:
            stored, mapping = read_safetensors(path, lambda name: rename(name) is not None, quantized=bool(scheme))
            self._maps.append(mapping)
            for name, one in stored.items():
                tensors_of_files.update(_each_expert(rename(name) or name, one))
        self._tensors.update(tensors_of_files if scheme is None else scheme.assemble(tensors_of_files))
        for name, tensor in self._tensors.items():
            if isinstance(tensor, StoredTensor) and not tensor.is_float:
                raise UnsupportedError(f"tensor {name} has dtype {tensor.dtype}, and is no part of a quantized matrix")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(part.data.nbytes for name in self for part in self.stored_parts(name))

    @property
    def is_quantized(self) -> bool:
        """Whether it has matrices that are no floats of 16 or 32 bits."""
        return any(not isinstance(tensor, StoredTensor) for tensor in self._tensors.values())

    @property
    def stored_types(self) -> StoredTypes:
        tensors = self._tensors.values()
        has_integers = any(isinstance(tensor, IntegerTensor | CodebookTensor) for tensor in tensors)
        bits = self.scheme.bits if self.scheme is not None else _BYTE
        return StoredTypes(
            integers=("int8" if bits == _BYTE else "int4") if has_integers else None,
            block_bits=self._block_bits(),
            has_mxfp4=any(isinstance(tensor, Mxfp4Tensor) for tensor in tensors),
        )

    def _block_bits(self) -> float | None:
        blocks = [name for name, tensor in self._tensors.items() if isinstance(tensor, BlockTensor)]
        if not blocks:
            return None
        blocks += [name for name, tensor in self._tensors.items() if isinstance(tensor, Mxfp4Tensor)]
        stored = sum(part.data.nbytes for name in blocks for part in self.stored_parts(name))
        return 8 * stored / sum(math.prod(self[name].shape) for name in blocks)

    def stored_parts(self, name: str) -> Sequence[StoredTensor | BlockTensor]:
        """What the files hold of a tensor."""
        tensor = self[name]
        return tensor.parts if isinstance(tensor, QuantizedTensor | JoinedHeads) else (tensor,)

    def spare_bias(self, name: str) -> bool:
        """Whether this is the bias of a quantized matrix, and is all zeros: some tools write one for each."""
        matrix = self._tensors.get(name.removesuffix("bias") + "weight")
        return isinstance(matrix, QuantizedTensor) and not self[name].f32().any()

    def borrow(self, name: str, other: Checkpoint, other_name: str) -> None:
        """Takes a tensor of another checkpoint over, under a name of its own."""
        self._tensors[name] = other[other_name]
        self._lenders[f"{name} is {other_name}"] = other

    @property
    def is_unchanged(self) -> bool:
        """Whether the files still are those that were opened, with the contents they had then."""
        same = all(state is not None and file_state(path) == state for path, state in self._states.items())
        return same and all(lender.is_unchanged for lender in self._lenders.values())

    @cached_property
    def content_key(self) -> str:
        """Of all that the files hold, wherever they lie, and of what their tensors are called here. Files that have
        changed since they were opened get a key that nothing else has: what was read of them is not known."""
        tensors = [(name, [(part.dtype, part.shape) for part in self.stored_parts(name)]) for name in self]
        lenders = [(words, lender.content_key) for words, lender in self._lenders.items()]
        return hashlib.sha256(repr((tensors, self._digests(), lenders)).encode()).hexdigest()

    def _digests(self) -> list[str]:
        with suppress(OSError):
            digests = [content_digest(path) for path in self._states]
            if self.is_unchanged:
                return digests
        return [secrets.token_hex()]

    def release_pages(self) -> None:
        """Gives the memory behind the mapping back to the system; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapping in self._maps:
                mapping.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(f"the checkpoint has no tensor {name}") from None
