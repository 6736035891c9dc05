"""Families of decoders whose queries, keys and values come out of compressed ones (MLA): DeepSeek and its kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, Experts, Latent, LayerNorms, TensorNames
from penstock.engines.openvino.families_experts import experts_of, in_groups, size_of_expert
from penstock.engines.openvino.families_kin import scaled_as_minicpm, with_growth
from penstock.engines.openvino.families_shared_experts import behind_dense, like_deepseek, sparse_layers, with_share
from penstock.engines.openvino.family import Settings, changed, family, filled, growing, mixed, plain, positive, size_in
from penstock.engines.openvino.rope import settings_in, yarn_scale

_NORM_EPS = 1e-6
"""Of the compressed, whatever config.json says of other norms."""
_DEEPSEEK_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@family("DeepseekV2ForCausalLM")
def deepseek_v2(c: Settings) -> DecoderSpec:
    """Softmax weighs, and its weights are not made to sum to 1."""
    c = filled(
        c,
        max_position_embeddings=2048,
        **_DEEPSEEK_SIZES,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
        first_k_dense_replace=0,
        num_experts_per_tok=6,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    )
    if c["topk_method"] not in ("greedy", "group_limited_greedy") or c.get("norm_topk_prob"):
        method = f"topk_method={str(c['topk_method'])[:50]}"
        raise UnsupportedError(f"config.json has {method} or norm_topk_prob, which is not supported in DeepSeek V2")
    spec = _latent(c, alternating=True).with_mlp(bias=bool(c.get("mlp_bias")))
    c = {**c, "num_experts": c["n_routed_experts"]}
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=False)
    experts = replace(experts, scale=positive(c, "routed_scaling_factor"))
    if c["topk_method"] != "greedy":
        experts = in_groups(experts, c, 1)
    spec = mixed(spec, with_share(experts, c), behind_dense(c))
    return replace(spec, names=TensorNames(shared_expert="shared_experts"))


@family("DeepseekV3ForCausalLM")
def deepseek_v3(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        max_position_embeddings=4096,
        **_DEEPSEEK_SIZES,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
    )
    return _mixture(c, behind_dense)


@family("AXK1ForCausalLM")
def axk1(c: Settings) -> DecoderSpec:
    """There is a norm behind mixtures, and none behind dense MLPs."""
    c = filled(
        c,
        max_position_embeddings=32768,
        **_DEEPSEEK_SIZES,
        n_routed_experts=192,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        moe_intermediate_size=2048,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    )
    spec, norms = _mixture(c, sparse_layers), LayerNorms(after_mlp="post_mlp_layernorm")
    layers = [replace(layer, norms=norms) if isinstance(layer.mlp, Experts) else layer for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


@family("Glm4MoeLiteForCausalLM")
def glm4_moe_lite(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=64,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        routed_scaling_factor=1.8,
    )
    return _mixture(c, sparse_layers)


def _mixture(c: Settings, layers: Callable[[Settings], Sequence[bool]]) -> DecoderSpec:
    c = filled(c, norm_topk_prob=True, rope_interleave=True)
    spec = _latent(c, alternating=bool(c["rope_interleave"]))
    return like_deepseek(spec, c, layers(c))


@family("Mistral4ForCausalLM")
def mistral4(c: Settings) -> DecoderSpec:
    """Softmax weighs and chooses. Queries grow beyond the original context."""
    c = filled(
        c,
        max_position_embeddings=1048576,
        kv_lora_rank=256,
        q_lora_rank=1024,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=128,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=0,
    )
    rope = dict(settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling") or _MISTRAL4_ROPE)
    rope.pop("partial_rotary_factor", None)  # qk_rope_head_dim says the same
    c, growth = with_growth(c, rope)
    spec = _mixture(c, behind_dense)
    experts = spec.experts
    if experts is not None:
        layers = [isinstance(layer.mlp, Experts) for layer in spec.layers]
        spec = mixed(spec, replace(experts, scores="softmax"), layers)
    spec = replace(spec, names=TensorNames(shared_expert="shared_experts"))
    return spec if growth is None else growing(spec, growth, [True] * spec.num_layers)


@family("YoutuForCausalLM")
def youtu(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        max_position_embeddings=131072,
        **_DEEPSEEK_SIZES,
        rope_interleave=True,
        tie_word_embeddings=True,
    )
    return _latent(c, alternating=bool(c["rope_interleave"]))


@family("MiniCPM3ForCausalLM")
def minicpm3(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        kv_lora_rank=256,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        tie_word_embeddings=True,
    )
    return scaled_as_minicpm(_latent(c, alternating=False).with_mlp(bias=bool(c.get("mlp_bias"))), c)


def _latent(c: Settings, *, alternating: bool) -> DecoderSpec:
    """Without experts. What rotates are the last values of a head, of a size of their own."""
    rotated = size_in(c, "qk_rope_head_dim")
    spec = plain(changed(c, {"head_dim": rotated, "num_key_value_heads": c["num_attention_heads"]}))
    values = {"v_head_dim": spec.hidden_size // spec.attention[0].num_heads} if c.get("v_head_dim") is None else c
    latent = Latent(
        query_rank=size_in(c, "q_lora_rank") if c["q_lora_rank"] is not None else 0,
        rank=size_in(c, "kv_lora_rank"),
        rotated=rotated,
        value_size=size_in(values, "v_head_dim"),
        norm_eps=_NORM_EPS,
    )
    size = rotated + size_in(c, "qk_nope_head_dim")
    if latent.value_size > size:
        raise UnsupportedError(f"config.json has v_head_dim={latent.value_size}, which is more than a head of {size}")
    return spec.with_attention(
        head_dim=size, scale=size**-0.5 * _stretch(c) ** 2, latent=latent, alternating_pairs=alternating
    )


def _stretch(c: Settings) -> float:
    """Scores of a context that was stretched are larger."""
    rope = settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling")
    weight = rope.get("mscale_all_dim")
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not weight:
        return 1.0
    return yarn_scale(positive(rope, "factor"), positive(rope, "mscale_all_dim"))
