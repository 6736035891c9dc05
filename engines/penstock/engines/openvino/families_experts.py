"""Families of decoders with mixtures of experts in place of MLPs."""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import (
    MLP,
    Clamp,
    DecoderSpec,
    ExpertGroups,
    Experts,
    QueryGrowth,
    TensorNames,
)
from penstock.engines.openvino.families_dense import NORMS_BEHIND, granite, mistral
from penstock.engines.openvino.family import (
    LIMIT,
    Settings,
    changed,
    count,
    every_layer,
    family,
    filled,
    growing,
    in_gguf,
    layers_by_type,
    layers_with_rope,
    mixed,
    plain,
    positive,
    rotating,
    upper_layers,
    windowed,
    with_limit,
)

_MOST_EXPERTS = 1024
_LARGEST_EXPERT = 1 << 20
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family("MixtralForCausalLM")
def mixtral(c: Settings) -> DecoderSpec:
    c = filled(c, sliding_window=None, rms_norm_eps=1e-5, rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2)
    spec = mistral(c)
    names = TensorNames(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2")
    return replace(mixed(spec, experts_of(spec, c, c["intermediate_size"], normalized=True)), names=names)


@family("GraniteMoeForCausalLM")
def granite_moe(c: Settings) -> DecoderSpec:
    c = filled(c, num_local_experts=8, num_experts_per_tok=2)
    spec = granite(c)
    names = TensorNames() if in_gguf(c) else _GRANITE_NAMES
    return replace(mixed(spec, experts_of(spec, c, c["intermediate_size"], normalized=True)), names=names)


_GRANITE_NAMES = TensorNames(
    mlp="",
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    shared_expert="shared_mlp",
    gate_up=("input_linear",),
    down="output_linear",
)


@family("FlexOlmoForCausalLM")
def flex_olmo(c: Settings) -> DecoderSpec:
    c = filled(c, max_position_embeddings=4096, rope_theta=5e5, num_experts=7, num_experts_per_tok=5)
    spec = plain(c).with_layers(norms=NORMS_BEHIND).with_attention(qk_norm="all heads")
    experts = experts_of(spec, c, c["intermediate_size"], normalized=bool(c.get("norm_topk_prob")))
    return mixed(spec, experts)


@family("MiniMaxM2ForCausalLM")
def minimax_m2(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
        rope_theta=5e6,
        num_local_experts=256,
        num_experts_per_tok=8,
    )
    if c.get("rotary_dim") is not None:
        c = filled(c, partial_rotary_factor=count(c, "rotary_dim") / (c["head_dim"] or 1))
    spec = plain(c, may_be_partial=True).with_attention(qk_norm="all heads", qkv_bias=False, o_bias=False)
    experts = replace(experts_of(spec, c, c["intermediate_size"], normalized=True), scores="sigmoid")
    names = TensorNames(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2", correction="e_score_correction_bias")
    return replace(mixed(spec, experts), names=names)


@family("PhimoeForCausalLM", "PhiMoEForCausalLM")
def phimoe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_local_experts=16,
        num_experts_per_tok=2,
        router_jitter_noise=0.01,
    )
    if c["num_experts_per_tok"] != 2:
        raise UnsupportedError("config.json has another number of num_experts_per_tok than 2, which Phi-MoE always has")
    spec = windowed(plain(c), every_layer(c))
    experts = experts_of(spec, c, c["intermediate_size"], normalized=False)
    experts = replace(experts, scores="sparse mixer", jitter=positive(c, "router_jitter_noise"))
    names = TensorNames(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2")
    return replace(mixed(spec, experts), names=names, norm="layer", head_bias=bool(c.get("lm_head_bias")))


@family("Qwen2MoeForCausalLM")
def qwen2_moe(c: Settings) -> DecoderSpec:
    """Windows of layers without layer_types have changed their meaning over time."""
    c = _filled_qwen(
        filled(
            c,
            qkv_bias=True,
            num_key_value_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        )
    )
    spec = plain(c).with_attention(qkv_bias=bool(c["qkv_bias"]), o_bias=False)
    if c.get("use_sliding_window") and c.get("layer_types") is None:
        raise UnsupportedError("use_sliding_window without layer_types is not supported in Qwen2-MoE")
    spec = windowed(spec, upper_layers(c))
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=bool(c["norm_topk_prob"]))
    shared = replace(experts.expert, intermediate_size=size_of_expert(c, "shared_expert_intermediate_size"))
    return mixed(spec, replace(experts, shared=shared), layers_with_experts(c))


@family("Qwen3MoeForCausalLM")
def qwen3_moe(c: Settings) -> DecoderSpec:
    c = _filled_qwen(
        filled(c, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    )
    spec = plain(c).with_attention(qk_norm="each head")
    if c.get("use_sliding_window"):
        spec = windowed(spec, every_layer(c))
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=bool(c["norm_topk_prob"]))
    if c.get("tensor_layout") == "stacked experts":  # Qwen3-VL's, in two tensors of [experts, in, out]
        experts = replace(experts, expert=replace(experts.expert, transposed=True))
    return mixed(spec, experts, layers_with_experts(c))


@family("OlmoeForCausalLM", known=(LIMIT,))
def olmoe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        norm_topk_prob=False,
        num_experts=64,
        num_experts_per_tok=8,
    )
    spec = with_limit(plain(c).with_attention(qk_norm="all heads"), c)
    return mixed(spec, experts_of(spec, c, c["intermediate_size"], normalized=bool(c["norm_topk_prob"])))


@family("GptOssForCausalLM")
def gpt_oss(c: Settings) -> DecoderSpec:
    """Windows are those of the layers that layer_types names, or of every other one, from the first. In GGUF files gate
    and up are two matrices, and all are [out, in]."""
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        attention_bias=True,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    )
    c = changed(c, {"rope_parameters": c.get("rope_parameters") or c.get("rope_scaling") or _GPT_OSS_ROPE})
    spec = plain(c).with_attention(sinks=True)
    layers = spec.num_layers
    every_other = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    spec = windowed(spec, layers_by_type(c.get("layer_types") or every_other, layers, c.get("sliding_window") or 0))
    experts = replace(
        experts_of(spec, c, c["intermediate_size"], normalized=True),
        router_bias=True,
        clamp=Clamp(positive(c, "swiglu_alpha"), positive(c, "swiglu_limit")),
    )
    names = TensorNames(router="router") if in_gguf(c) else TensorNames(router="router", gate_up=("gate_up_proj",))
    expert = replace(experts.expert, bias=True, transposed=not in_gguf(c))
    return replace(mixed(spec, replace(experts, expert=expert)), names=names)


@family("Llama4ForCausalLM", known=("use_qk_norm",))
def llama4(c: Settings) -> DecoderSpec:
    """intermediate_size is that of experts there. Layers that rotate attend to nothing before their own chunk of the
    context, so it ends with the first one."""
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size_mlp=16384,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        no_rope_layer_interval=4,
        use_qk_norm=True,
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
    )
    chunk = count(c, "attention_chunk_size") if c.get("attention_chunk_size") is not None else 0
    context = c["max_position_embeddings"]
    c = changed(
        c,
        {
            "intermediate_size": c["intermediate_size_mlp"],
            "moe_intermediate_size": c["intermediate_size"],
            "max_position_embeddings": min(context, chunk or context),
        },
    )
    spec = rotating(plain(c), c, layers_with_rope(c)).with_attention(
        alternating_pairs=True, qk_norm="each head, weightless" if c["use_qk_norm"] else ""
    )
    if c["attn_temperature_tuning"]:
        spec = growing(spec, _llama4_growth(c), [rope is None for rope in spec.ropes])
    names = TensorNames(mlp="feed_forward", router="router")
    return replace(_llama4_mixed(spec, c), names=names)


def _llama4_growth(c: Settings) -> QueryGrowth:
    every = c["floor_scale"]
    if type(every) is not int or every < 1:
        raise UnsupportedError(f"config.json has floor_scale={str(every)[:50]}, which is not a number of tokens")
    return QueryGrowth(every, positive(c, "attn_scale"), 1)


def _llama4_mixed(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """With experts in the layers in moe_layers; without it, in each one that interleave_moe_layer_step ends at."""
    chosen, number = c.get("moe_layers"), spec.num_layers
    if chosen is None:
        step = count(c, "interleave_moe_layer_step") or number + 1
        chosen = range(step - 1, number, step)
    elif not isinstance(chosen, list) or not all(type(n) is int and 0 <= n < number for n in chosen):
        raise UnsupportedError(f"moe_layers is not understood: {str(chosen)[:100]}; it has numbers of layers")
    if not chosen:
        return spec
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=False)
    experts = replace(
        experts,
        expert=replace(experts.expert, transposed=True),
        shared=experts.expert,
        gated_share=False,
        weighs_inputs=True,
    )
    return mixed(spec, experts, [n in chosen for n in range(number)])


def _filled_qwen(c: Settings) -> Settings:
    return filled(
        c,
        sliding_window=4096,
        max_window_layers=28,
        max_position_embeddings=32768,
        decoder_sparse_step=1,
        norm_topk_prob=False,
    )


def layers_with_experts(c: Settings) -> list[bool]:
    """Every decoder_sparse_step-th layer, without those of mlp_only_layers."""
    step, dense = count(c, "decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not step or not isinstance(dense, list):
        raise UnsupportedError("config.json's decoder_sparse_step and mlp_only_layers are not understood")
    return [n not in dense and (n + 1) % step == 0 for n in range(c["num_hidden_layers"])]


def experts_of(spec: DecoderSpec, c: Settings, size: int, *, normalized: bool) -> Experts:
    """`size`: intermediate_size of an expert; else it is as the MLPs of `spec`."""
    number = c.get("num_local_experts") or c.get("num_experts") or 0
    chosen = c["num_experts_per_tok"]
    if type(number) is not int or type(chosen) is not int or not 0 < chosen <= number <= _MOST_EXPERTS:
        raise UnsupportedError(f"config.json chooses {str(chosen)[:20]} of {str(number)[:20]} experts")
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MLP)
    return Experts(number, chosen, replace(mlp, intermediate_size=size), normalized)


def in_groups(experts: Experts, c: Settings, best: int) -> Experts:
    """With n_group and topk_group, if there are any. `best`: as `ExpertGroups.best`."""
    number, chosen = c.get("n_group") or 1, c.get("topk_group") or 1
    known = type(number) is int and type(chosen) is int and 0 < chosen <= number and experts.count % number == 0
    size = experts.count // number if known else 0
    if not known or (number > 1 and size < best) or experts.per_token > chosen * size:
        raise UnsupportedError(
            f"config.json has n_group={str(number)[:20]} and topk_group={str(chosen)[:20]}, and chooses"
            f" {experts.per_token} of {experts.count} experts: these do not go together"
        )
    return experts if number == 1 else replace(experts, groups=ExpertGroups(number, chosen, best))


def size_of_expert(c: Settings, key: str) -> int:
    value = c[key]
    if type(value) is not int or not 0 < value <= _LARGEST_EXPERT:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a size of an expert")
    return value
