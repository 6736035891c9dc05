"""Families of decoders with mixtures of experts, and beside them an expert that every token has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, Experts, LayerNorms, TensorNames
from penstock.engines.openvino.families_dense import exaone4, llama
from penstock.engines.openvino.families_experts import experts_of, granite_moe, in_groups, size_of_expert
from penstock.engines.openvino.families_kin import ernie4_5, hunyuan
from penstock.engines.openvino.family import (
    Settings,
    changed,
    count,
    family,
    filled,
    mixed,
    plain,
    positive,
    renamed,
    upper_layers,
    windowed,
)

_CORRECTION = "e_score_correction_bias"
_DEEPSEEK_NAMES = TensorNames(shared_expert="shared_experts", correction=f"gate.{_CORRECTION}")
_LEAST_SUM = 1e-20


@family("Glm4MoeForCausalLM", known=("use_qk_norm",))
def glm4_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    )
    norm = "each head" if c.get("use_qk_norm") else ""
    spec = plain(c, may_be_partial=True).with_attention(o_bias=False, qk_norm=norm)
    return like_deepseek(spec, c, behind_dense(c))


@family("Dots1ForCausalLM")
def dots1(c: Settings) -> DecoderSpec:
    """Windows in the layers that layer_types names, or in all from max_window_layers on."""
    c = filled(
        c,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        sliding_window=4096,
        max_window_layers=62,
        use_sliding_window=True,
        n_shared_experts=0,
        first_k_dense_replace=0,
        norm_topk_prob=False,
    )
    spec = windowed(plain(c).with_attention(qk_norm="each head"), upper_layers(c))
    return like_deepseek(spec, c, behind_dense(c))


@family("SolarOpenForCausalLM")
def solar_open(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1280,
        n_shared_experts=1,
        norm_topk_prob=True,
    )
    c = filled(c, intermediate_size=c["moe_intermediate_size"])
    return like_deepseek(plain(c).with_attention(o_bias=False), c, [True] * c["num_hidden_layers"])


@family("ExaoneMoeForCausalLM")
def exaone_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        num_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    spec = exaone4(c).with_layers(norms=LayerNorms())
    spec = like_deepseek(spec, renamed(c, n_shared_experts="num_shared_experts"), sparse_layers(c))
    return replace(spec, names=replace(_DEEPSEEK_NAMES, correction=_CORRECTION))


@family("HYV3ForCausalLM")
def hy_v3(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=11158840.0,
        num_experts=192,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        num_shared_experts=1,
        first_k_dense_replace=1,
        router_scaling_factor=2.826,
    )
    spec = llama(c).with_attention(qk_norm="each head")
    c = changed(c, {"norm_topk_prob": True, "routed_scaling_factor": c["router_scaling_factor"]})
    spec = like_deepseek(spec, renamed(c, n_shared_experts="num_shared_experts"), sparse_layers(c))
    return replace(spec, names=TensorNames(router="router.gate", shared_expert="shared_mlp", correction="expert_bias"))


@family("Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=4,
        moe_k=6,
        moe_num_experts=64,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    )
    spec = ernie4_5(filled(c, head_dim=None))
    c = renamed(c, num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    c = renamed(c, n_shared_experts="moe_num_shared_experts")
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=True)
    experts = replace(experts, least_sum=positive(c, "moe_norm_min"))
    names = replace(_DEEPSEEK_NAMES, correction=f"moe_statics.{_CORRECTION}")
    return replace(mixed(spec, with_share(experts, c), _ernie_layers(c)), names=names)


def _ernie_layers(c: Settings) -> list[bool]:
    layers, every, first = c["num_hidden_layers"], count(c, "moe_layer_interval"), count(c, "moe_layer_start_index")
    last = layers - 1 if c["moe_layer_end_index"] == -1 else count(c, "moe_layer_end_index")
    if not every:
        raise UnsupportedError("config.json has moe_layer_interval=0, which is not an interval of layers")
    return [(n + 1) % every == 0 and first <= n <= last for n in range(layers)]


@family("HunYuanMoEV1ForCausalLM")
def hunyuan_moe(c: Settings) -> DecoderSpec:
    """The shared expert has the size of the others."""
    c = filled(c, num_experts=1, moe_topk=1)
    spec = hunyuan(c)
    c = changed(c, {"num_experts": _everywhere(c, "num_experts"), "num_experts_per_tok": _everywhere(c, "moe_topk")})
    experts = experts_of(spec, c, c["intermediate_size"], normalized=True)
    names = replace(spec.names, router="gate.wg", shared_expert="shared_mlp")
    return replace(mixed(spec, replace(experts, shared=experts.expert, gated_share=False)), names=names)


def _everywhere(c: Settings, key: str) -> object:
    """What a list has for each layer, if it is the same."""
    value = c[key]
    if not isinstance(value, list):
        return value
    if len(value) != c["num_hidden_layers"] or len(set(map(str, value))) != 1:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}: layers that differ in this are not supported")
    return value[0]


@family("GraniteMoeSharedForCausalLM")
def granite_moe_shared(c: Settings) -> DecoderSpec:
    c = filled(c, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=0)
    return _with_shared_mlp(granite_moe(c), c)


def _with_shared_mlp(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    if not c["shared_intermediate_size"]:
        return spec
    experts = spec.experts
    assert experts is not None
    shared = replace(experts.expert, intermediate_size=size_of_expert(c, "shared_intermediate_size"))
    return mixed(spec, replace(experts, shared=shared, gated_share=False))


def like_deepseek(spec: DecoderSpec, c: Settings, layers: Sequence[bool]) -> DecoderSpec:
    """Sigmoids are weights; corrected, they choose. `layers`: those with experts."""
    c = filled(c, routed_scaling_factor=1.0)
    size = size_of_expert(c, "moe_intermediate_size")
    number = c.get("n_routed_experts") or c.get("num_experts")
    experts = experts_of(spec, {**c, "num_experts": number}, size, normalized=bool(c["norm_topk_prob"]))
    experts = replace(experts, scores="sigmoid", least_sum=_LEAST_SUM, scale=positive(c, "routed_scaling_factor"))
    experts = in_groups(experts, c, 2)
    further = count(filled(c, num_nextn_predict_layers=0), "num_nextn_predict_layers")
    spec = mixed(spec, with_share(experts, c), layers)
    return replace(spec, names=_DEEPSEEK_NAMES, further_layers=further)


def with_share(experts: Experts, c: Settings) -> Experts:
    """With an expert for every token, of the size of several."""
    number = count(c, "n_shared_experts")
    if not number:
        return experts
    size = size_of_expert({"size": number * experts.expert.intermediate_size}, "size")
    return replace(experts, shared=replace(experts.expert, intermediate_size=size), gated_share=False)


def behind_dense(c: Settings) -> list[bool]:
    """Layers that have experts: all but the first few."""
    dense = count(c, "first_k_dense_replace")
    return [n >= dense for n in range(c["num_hidden_layers"])]


def sparse_layers(c: Settings) -> list[bool]:
    """Layers that mlp_layer_types calls sparse; without it, as `behind_dense`."""
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        return behind_dense(c)
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != c["num_hidden_layers"]:
        raise UnsupportedError(f"mlp_layer_types is not understood: {str(kinds)[:100]}; each layer is dense or sparse")
    return [kind == "sparse" for kind in kinds]
