"""Entry of the architectures that GGUF files have: general.architecture -> Architecture. A new one stands in one of
the modules of families."""

from __future__ import annotations

from collections.abc import Container

from penstock.engines.formats.gguf import (
    families_dense,
    families_early,
    families_experts,
    families_gemma,
    families_hybrid,
    families_latent,
    families_mamba,
    families_shared_experts,
)
from penstock.engines.formats.gguf.architecture import Architecture

_MODULES = (
    families_dense,
    families_experts,
    families_shared_experts,
    families_gemma,
    families_latent,
    families_hybrid,
    families_mamba,
    families_early,
)

ARCHITECTURES = {name: one for module in _MODULES for name, one in module.ARCHITECTURES.items()}

_VARIANTS = {
    "llama": ("blk.0.ffn_gate_inp.weight", families_experts.MIXTRAL),
    "falcon": ("blk.0.attn_norm_2.weight", families_early.FALCON_OF_TWO_NORMS),
}
"""Architectures that have one name with another, by a tensor of theirs alone."""


def find_architecture(name: object, tensors: Container[str]) -> Architecture | None:
    """By general.architecture and the names of the file's tensors."""
    tensor, variant = _VARIANTS.get(str(name), ("", None))
    return variant if tensor in tensors else ARCHITECTURES.get(str(name))


def hugging_face_names() -> set[str]:
    """What config.json calls the architectures that are read."""
    variants = [variant for _, variant in _VARIANTS.values()]
    known = (*ARCHITECTURES.values(), *variants)
    return {name for one in known for name in (one.hugging_face, *one.others)}
