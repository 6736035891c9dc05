"""Families of Gemma 3n and 4: layers read each other's keys and values, and get embeddings of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import (
    MLP,
    AltUp,
    Attention,
    DecoderSpec,
    LayerEmbeddings,
    LayerNorms,
    LayerSpec,
    TensorNames,
)
from penstock.engines.openvino.families_experts import experts_of, size_of_expert
from penstock.engines.openvino.family import (
    LOGITS_CAP,
    Settings,
    all_but_every_nth,
    changed,
    count,
    family,
    filled,
    plain,
    renamed,
    rotated_by_window,
    size_in,
    windowed,
)
from penstock.engines.openvino.rope import parse_ropes_of_layer_types, settings_in

_GEMMA3N_ROPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
_BIDIRECTIONAL = "use_bidirectional_attention"
_GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_NORMS = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
)
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_SIZES = ("num_key_value_heads", "head_dim")


@family("Gemma3nForCausalLM", known=(LOGITS_CAP,))
def gemma3n(c: Settings) -> DecoderSpec:
    """Several hidden states. The MLPs of the first ten layers of a deep model are sparse."""
    c = filled(
        c,
        num_key_value_heads=2,
        head_dim=256,
        intermediate_size=16384,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=32768,
        sliding_window=512,
        sliding_window_pattern=5,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        num_kv_shared_layers=15,
        altup_num_inputs=4,
        altup_active_idx=0,
        altup_correct_scale=True,
        laurel_rank=64,
        tie_word_embeddings=True,
        **{LOGITS_CAP: 30.0},
    )
    sizes = c["intermediate_size"]
    spec = plain(
        changed(c, {"intermediate_size": sizes[0] if isinstance(sizes, list) and sizes else sizes}),
        activation_key="hidden_activation",
        rotates=False,
    )
    spec = windowed(spec, all_but_every_nth(c)).with_attention(scale=1.0, qk_norm="each head", norms_values=True)
    defaults = {kind: {**rope, "rope_theta": _theta(c, kind)} for kind, rope in _GEMMA3N_ROPE.items()}
    ropes = parse_ropes_of_layer_types(c, spec.attention[0].head_dim, defaults)
    spec = _sharing(rotated_by_window(_with_own_mlps(spec, c), c, ropes), c)
    active = count(c, "altup_active_idx")
    altup = AltUp(size_in(c, "altup_num_inputs"), active, bool(c["altup_correct_scale"]), size_in(c, "laurel_rank"))
    if active >= altup.count:
        raise UnsupportedError(f"config.json has altup_active_idx={active}, of {altup.count} hidden states")
    return replace(
        spec.with_layers(norms=_NORMS),
        embedding_scale=math.sqrt(c["hidden_size"]),
        embeddings_of_layers=_embeddings_of_layers(spec, c),
        altup=altup,
    )


def _theta(c: Settings, kind: str) -> float:
    """Older settings have the bases outside."""
    older = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}[kind]
    return c.get(older) or _GEMMA3N_ROPE[kind]["rope_theta"]


def _with_own_mlps(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """Of sizes and sparsities that each layer has for itself, or all have alike."""
    shares = c.get("activation_sparsity_pattern")
    if shares is None:
        sparse = _SPARSE_LAYERS if spec.num_layers > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (spec.num_layers - sparse)
    sizes = c["intermediate_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes] * spec.num_layers
    known = isinstance(shares, list) and all(isinstance(share, int | float) and 0 <= share < 1 for share in shares)
    if not known or len(shares) != spec.num_layers:
        raise UnsupportedError(
            f"activation_sparsity_pattern is not understood: {str(shares)[:50]}; each layer has a share from 0 to 1"
        )
    layers = []
    for layer, size, share in zip(spec.layers, sizes, shares, strict=True):
        assert isinstance(layer.mlp, MLP)
        layers.append(replace(layer, mlp=replace(layer.mlp, intermediate_size=size, sparsity=float(share))))
    return replace(spec, layers=tuple(layers))


@family("Gemma4ForCausalLM", known=(LOGITS_CAP, _BIDIRECTIONAL))
def gemma4(c: Settings) -> DecoderSpec:
    """Layers without a window have heads of another size, and may have no values of their own. Tokens of images attend
    to later ones in some models; those of text never do."""
    c = filled(
        c,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        sliding_window=512,
        sliding_window_pattern=6,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        num_kv_shared_layers=0,
        tie_word_embeddings=True,
    )
    if c.get(_BIDIRECTIONAL) not in (None, False, "vision"):
        raise UnsupportedError(
            f"config.json has {_BIDIRECTIONAL}: models that attend to later tokens are not supported"
        )
    spec = plain(c, activation_key="hidden_activation", rotates=False)
    spec = windowed(spec, [*all_but_every_nth(c)[:-1], 0])
    spec = _with_own_heads(spec.with_attention(scale=1.0, qk_norm="each head", norms_values=True), c)
    spec = _sharing(rotated_by_window(spec, c, _ropes(spec, c)), c).with_layers(norms=_NORMS, scaled=True)
    if c.get("enable_moe_block"):
        experts = renamed(filled(c, num_experts_per_tok=None), num_experts_per_tok="top_k_experts")
        size = size_of_expert(filled(c, moe_intermediate_size=None), "moe_intermediate_size")
        spec = spec.with_layers(beside=replace(experts_of(spec, experts, size, normalized=True), router_norm=True))
    return replace(
        spec,
        embedding_scale=math.sqrt(c["hidden_size"]),
        embeddings_of_layers=_embeddings_of_layers(spec, c),
        names=TensorNames(router="router.proj"),
    )


@family("Gemma4UnifiedForCausalLM", known=(LOGITS_CAP, _BIDIRECTIONAL))
def gemma4_unified(c: Settings) -> DecoderSpec:
    """Without embeddings of layers and without experts."""
    c = filled(c, sliding_window=1024, max_position_embeddings=262144)
    return gemma4(changed(c, {"hidden_size_per_layer_input": 0, "enable_moe_block": False}))


def _with_own_heads(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """Sizes of heads, and numbers of those of keys and values, by layer: as per_layer_config has them, or
    global_head_dim and num_global_key_value_heads of the layers without a window."""
    by_layer = settings_in(c, "per_layer_config")
    has_values = not c.get("attention_k_eq_v")
    layers = []
    for n, (layer, attention) in enumerate(zip(spec.layers, spec.attention.values(), strict=True)):
        own = settings_in(by_layer, str(n)) if by_layer else _global_heads(c, attention)
        if set(own) - set(_SIZES):
            raise UnsupportedError(f"config.json's per_layer_config has more than {' and '.join(_SIZES)}")
        sizes = changed(c, own)
        kv_heads, head_dim = (size_in(sizes, key) for key in _SIZES)
        if attention.num_heads % kv_heads or head_dim % 2:
            raise UnsupportedError(f"{attention.num_heads} heads of size {head_dim} on {kv_heads} do not go together")
        attention = replace(
            attention, num_kv_heads=kv_heads, head_dim=head_dim, has_values=has_values or bool(attention.window)
        )
        layers.append(replace(layer, mixer=attention))
    return replace(spec, layers=tuple(layers))


def _global_heads(c: Settings, attention: Attention) -> Mapping[str, Any]:
    if attention.window:
        return {}
    heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
    return {"head_dim": c["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})


def _ropes(spec: DecoderSpec, c: Settings) -> Any:
    kinds = {"sliding_attention" if layer.window else "full_attention": layer for layer in spec.attention.values()}
    sizes = {kind: kinds[kind].head_dim if kind in kinds else 2 for kind in _GEMMA4_ROPE}
    return parse_ropes_of_layer_types(c, sizes, _GEMMA4_ROPE)


def _sharing(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """The last num_kv_shared_layers read the keys and values of the last layer before them that has the same window.
    Their MLPs may be twice as wide."""
    number = count(c, "num_kv_shared_layers")
    first = spec.num_layers - number
    own = {layer.window: n for n, layer in spec.attention.items() if n < first}
    layers: list[LayerSpec] = list(spec.layers[: max(first, 0)])
    for n, attention in list(spec.attention.items())[len(layers) :]:
        source = own.get(attention.window)
        if source is None or _heads(spec.attention[source]) != _heads(attention):
            raise UnsupportedError(
                f"config.json's num_kv_shared_layers={number} leaves no layer with keys for layer {n}"
            )
        layer = replace(spec.layers[n], mixer=replace(attention, shares=source))
        mlp = layer.mlp
        if c.get("use_double_wide_mlp") and isinstance(mlp, MLP):
            layer = replace(layer, mlp=replace(mlp, intermediate_size=2 * mlp.intermediate_size))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def _heads(attention: Attention) -> Sequence[int]:
    return attention.num_kv_heads, attention.head_dim


def _embeddings_of_layers(spec: DecoderSpec, c: Settings) -> LayerEmbeddings | None:
    if not c["hidden_size_per_layer_input"]:
        return None
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MLP)
    vocab_size = c["vocab_size_per_layer_input"]
    if type(vocab_size) is not int or vocab_size < 1:
        raise UnsupportedError(f"config.json has vocab_size_per_layer_input={str(vocab_size)[:50]}")
    padding = c.get("pad_token_id")
    padding = padding if type(padding) is int and 0 < padding < vocab_size else 0
    return LayerEmbeddings(vocab_size, size_in(c, "hidden_size_per_layer_input"), mlp.activation, padding)
