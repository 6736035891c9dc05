"""Families of decoders some of whose layers are Mamba-2's state spaces in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, Mamba2, TensorNames
from penstock.engines.openvino.families_dense import granite
from penstock.engines.openvino.families_hybrid import layers_with_attention, small_size, with_recurrent
from penstock.engines.openvino.families_shared_experts import granite_moe_shared
from penstock.engines.openvino.family import Settings, changed, family, filled, in_gguf, rotating

_USUAL_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Of layers, in place of those that older checkpoints have."""


@family("GraniteMoeHybridForCausalLM")
def granite_hybrid(c: Settings) -> DecoderSpec:
    """Granite 4: a shared MLP, and experts beside it or none. Layers rotate only if position_embedding_type says so."""
    c = filled(
        c,
        max_position_embeddings=2048,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=1024,
        mamba_n_heads=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_conv=4,
    )
    if c["num_local_experts"]:
        spec = granite_moe_shared(c)
    else:
        spec = granite(changed(c, {"intermediate_size": c["shared_intermediate_size"]}))
        names = TensorNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")
        spec = spec if in_gguf(c) else replace(spec, names=names)
    rotates = c.get("position_embedding_type") == "rope"
    spec = rotating(spec, c, [rotates] * spec.num_layers)
    return with_recurrent(spec, _kinds(c), "linear_attention", _state_space(c))


def _kinds(c: Settings) -> Sequence[str]:
    """linear_attention or full_attention, of each layer."""
    kinds: Any = c.get("layer_types")
    if isinstance(kinds, list):
        kinds = [_USUAL_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return layers_with_attention(kinds, c["num_hidden_layers"], "linear_attention")


def _state_space(c: Settings) -> Mamba2:
    c = filled(c, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False)
    heads, groups = small_size(c, "mamba_n_heads"), small_size(c, "mamba_n_groups")
    inner = small_size(c, "mamba_expand") * c["hidden_size"]
    if inner % heads or heads % groups or c.get("mamba_d_head", "auto") not in ("auto", None, inner // heads):
        raise UnsupportedError(f"{heads} heads of {groups} groups in {inner} values do not go together in Mamba-2")
    _check_steps(c.get("time_step_limit"))
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=small_size(c, "mamba_d_state"),
        kernel=small_size(c, "mamba_d_conv"),
        bias=bool(c["mamba_proj_bias"]),
        kernel_bias=bool(c["mamba_conv_bias"]),
    )


def _check_steps(limits: Any) -> None:
    if limits not in (None, [0.0, math.inf], [0.0, _INFINITY]):
        raise UnsupportedError(
            f"config.json has time_step_limit={str(limits)[:50]}: steps with limits are not supported"
        )


_INFINITY = {"__float__": "Infinity"}
"""As transformers writes it."""
