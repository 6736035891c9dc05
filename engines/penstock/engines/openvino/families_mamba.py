"""Families of decoders some of whose layers are Mamba-2's state spaces, in place of attention or beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, Experts, GatedNorm, LayerNorms, Mamba2, TensorNames
from penstock.engines.openvino.families_dense import granite
from penstock.engines.openvino.families_experts import size_of_expert
from penstock.engines.openvino.families_hybrid import layers_with_attention, small_size, with_recurrent
from penstock.engines.openvino.families_shared_experts import granite_moe_shared, like_deepseek
from penstock.engines.openvino.family import (
    Settings,
    changed,
    family,
    filled,
    in_gguf,
    plain,
    positive,
    rotating,
    size_in,
)

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
        **_STATE_SPACE,
    )
    if c["num_local_experts"]:
        spec = granite_moe_shared(c)
    else:
        spec = granite(changed(c, {"intermediate_size": c["shared_intermediate_size"]}))
        names = TensorNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")
        spec = spec if in_gguf(c) else replace(spec, names=names)
    rotates = c.get("position_embedding_type") == "rope"
    spec = rotating(spec, c, [rotates] * spec.num_layers)
    kinds = layers_with_attention(_renamed(c.get("layer_types")), c["num_hidden_layers"], "linear_attention")
    return with_recurrent(spec, kinds, "linear_attention", _state_space(c))


@family("BambaForCausalLM")
def bamba(c: Settings) -> DecoderSpec:
    """attn_layer_indices are the layers with attention. Half of each head rotates."""
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        **_STATE_SPACE,
    )
    spec = plain(c, may_be_partial=True).with_layers(norms=_FEED_FORWARD).with_mlp(bias=bool(c.get("mlp_bias")))
    attending = c.get("attn_layer_indices") or []
    if not isinstance(attending, list):
        raise UnsupportedError(f"config.json has attn_layer_indices={str(attending)[:50]}, which is not a list")
    kinds = ["full_attention" if n in attending else "linear_attention" for n in range(spec.num_layers)]
    kinds = layers_with_attention(kinds, spec.num_layers, "linear_attention")
    return replace(with_recurrent(spec, kinds, "linear_attention", _state_space(c)), names=_FEED_FORWARD_NAMES)


_FEED_FORWARD = LayerNorms(before_mlp="pre_ff_layernorm")
_FEED_FORWARD_NAMES = TensorNames(norm="model.final_layernorm", mlp="feed_forward")


@family("FalconH1ForCausalLM")
def falcon_h1(c: Settings) -> DecoderSpec:
    """Each layer has attention, and a state space that gets the same input. Most results have a scale of their own."""
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        mamba_d_ssm=1024,
        mamba_norm_before_gate=True,
        **_STATE_SPACE,
        **dict.fromkeys(_FALCON_SCALES, 1.0),
    )
    scales = {key: positive(c, key) for key in _FALCON_SCALES}
    gate, down = _scales(c, "mlp_multipliers", 2)
    spec = plain(c).with_mlp(bias=bool(c.get("mlp_bias")), gate_scale=gate, output_scale=down)
    spec = spec.with_attention(
        scale=spec.attention[0].scale * scales["key_multiplier"],
        input_scale=scales["attention_in_multiplier"],
        output_scale=scales["attention_out_multiplier"],
    )
    norm: GatedNorm = "norm first" if c["mamba_norm_before_gate"] else "gate first"
    states = replace(
        _state_space(c, None if c["mamba_d_ssm"] is None else size_in(c, "mamba_d_ssm")),
        out_bias=bool(c.get("projectors_bias")),
        norm=norm if c.get("mamba_rms_norm") else "gate alone",
        input_scale=scales["ssm_in_multiplier"],
        part_scales=_scales(c, "ssm_multipliers", 5),
        output_scale=scales["ssm_out_multiplier"],
    )
    return replace(
        spec.with_layers(norms=_FEED_FORWARD, with_states=states),
        embedding_scale=scales["embedding_multiplier"],
        logits_scale=scales["lm_head_multiplier"],
        names=_FEED_FORWARD_NAMES,
    )


_FALCON_SCALES = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def _scales(c: Settings, key: str, number: int) -> tuple[float, ...]:
    values: Any = c.get(key)
    if values is None:
        return (1.0,) * number
    if not isinstance(values, list) or len(values) != number:
        raise UnsupportedError(f"config.json has {key}={str(values)[:50]}, which is not a list of {number} numbers")
    return tuple(positive({key: value}, key) for value in values)


@family("NemotronHForCausalLM")
def nemotron_h(c: Settings) -> DecoderSpec:
    """Each layer is one part: a state space, attention without positions, an MLP, or experts."""
    kinds = _parts_of_layers(c)
    c = filled(
        changed(c, {"num_hidden_layers": len(kinds)}),
        num_key_value_heads=8,
        head_dim=c.get("attention_head_dim") or 128,
        max_position_embeddings=4096,
        intermediate_size=21504,
        mlp_hidden_act="relu2",
        layer_norm_epsilon=1e-5,
    )
    spec = plain(c, activation_key="mlp_hidden_act", eps_key="layer_norm_epsilon", rotates=False)
    spec = spec.with_mlp(gated=False, bias=bool(c.get("mlp_bias")))
    if "moe" in kinds:
        spec = _with_experts(spec, c, [kind == "moe" for kind in kinds])
    if "linear_attention" in kinds:
        spec = with_recurrent(spec, kinds, "linear_attention", _state_space_of_nemotron(c))
    mixed, alone = LayerNorms("norm"), LayerNorms(before_mlp="norm")
    layers = [
        replace(layer, mixer=None, norms=alone) if kind in ("mlp", "moe") else replace(layer, mlp=None, norms=mixed)
        for kind, layer in zip(kinds, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers), names=_NEMOTRON_NAMES)


_NEMOTRON_NAMES = TensorNames(
    embedding="model.embeddings",
    norm="model.norm_f",
    attention="mixer",
    state_space="mixer",
    mlp="mixer",
    gate_up=("up_proj",),
    correction="gate.e_score_correction_bias",
    shared_expert="shared_experts",
)
_PARTS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""By the letters of hybrid_override_pattern."""


def _parts_of_layers(c: Settings) -> list[str]:
    """linear_attention, full_attention, mlp or moe, of each layer. Their number may be given by these alone."""
    layers: Any = c.get("num_hidden_layers")
    pattern = c.get("hybrid_override_pattern")
    kinds: Any = next((c[key] for key in ("layers_block_type", "layer_types") if c.get(key) is not None), None)
    if kinds is None and pattern is None:
        if layers is None:
            raise KeyError("num_hidden_layers")
        kinds = list(_PARTS.values())
    elif kinds is None:
        kinds = [_PARTS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    number = layers if layers is not None or not isinstance(kinds, list) else len(kinds)
    return layers_with_attention(_renamed(kinds), number, "linear_attention", "mlp", "moe")


def _with_experts(spec: DecoderSpec, c: Settings, layers: Sequence[bool]) -> DecoderSpec:
    """As DeepSeek's, but for the size of the expert that every token has, and a space of their own."""
    c = filled(
        c,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        norm_topk_prob=True,
    )
    spec = like_deepseek(spec, changed(c, {"n_shared_experts": 1, "num_nextn_predict_layers": 0}), layers)
    experts = spec.experts
    assert experts is not None
    assert experts.shared is not None
    size = size_of_expert(c, "moe_shared_expert_intermediate_size")
    experts = replace(
        experts,
        expert=replace(experts.expert, bias=False),
        shared=replace(experts.shared, intermediate_size=size),
        latent_size=0 if c.get("moe_latent_size") is None else size_in(c, "moe_latent_size"),
    )
    own = [replace(layer, mlp=experts) if isinstance(layer.mlp, Experts) else layer for layer in spec.layers]
    return replace(spec, layers=tuple(own))


_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Settings of Nemotron-H that transformers reads by another name, too, which goes first (NemotronHConfig)."""


def _state_space_of_nemotron(c: Settings) -> Mamba2:
    """There is no least step. (transformers has time_step_min as one where a step has several tokens, and none where it
    has a single token; other implementations have none.)"""
    c = filled(
        changed(c, {name: c[older] for older, name in _OLDER_NAMES.items() if older in c}),
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        use_conv_bias=True,
        mamba_hidden_act="silu",
    )
    _check_activation(c, "mamba_hidden_act")
    _check_steps(c.get("time_step_limit"))
    heads, groups, head_dim = (small_size(c, key) for key in ("mamba_num_heads", "n_groups", "mamba_head_dim"))
    if heads % groups:
        raise UnsupportedError(f"{heads} heads of {groups} groups do not go together in Mamba-2")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=small_size(c, "ssm_state_size"),
        kernel=small_size(c, "conv_kernel"),
        bias=bool(c.get("use_bias")),
        out_bias=bool(c.get("use_bias")),
        kernel_bias=bool(c["use_conv_bias"]),
    )


_STATE_SPACE = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}


def _state_space(c: Settings, inner: int | None = None) -> Mamba2:
    """`inner`: as `Mamba2.inner`; None: the hidden size times mamba_expand."""
    c = filled(c, mamba_expand=2, mamba_conv_bias=True, hidden_act="silu")
    heads, groups = small_size(c, "mamba_n_heads"), small_size(c, "mamba_n_groups")
    if inner is None:
        inner = small_size(c, "mamba_expand") * c["hidden_size"]
    if inner % heads or heads % groups or c.get("mamba_d_head", "auto") not in ("auto", None, inner // heads):
        raise UnsupportedError(f"{heads} heads of {groups} groups in {inner} values do not go together in Mamba-2")
    _check_activation(c, "hidden_act")
    _check_steps(c.get("time_step_limit"))
    bias = bool(c.get("mamba_proj_bias"))
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=small_size(c, "mamba_d_state"),
        kernel=small_size(c, "mamba_d_conv"),
        bias=bias,
        out_bias=bias,
        kernel_bias=bool(c["mamba_conv_bias"]),
    )


def _renamed(kinds: Any) -> Any:
    """Kinds of layers by their usual names; what is not understood stays as it is."""
    if not isinstance(kinds, list):
        return kinds
    return [_USUAL_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def _check_activation(c: Settings, key: str) -> None:
    if c[key] not in ("silu", "swish"):
        raise UnsupportedError(f"config.json has {key}={str(c[key])[:50]}: state spaces have silu, no other activation")


def _check_steps(limits: Any) -> None:
    if limits not in (None, [0.0, math.inf], [0.0, _INFINITY]):
        raise UnsupportedError(
            f"config.json has time_step_limit={str(limits)[:50]}: steps with limits are not supported"
        )


_INFINITY = {"__float__": "Infinity"}
"""As transformers writes it."""
