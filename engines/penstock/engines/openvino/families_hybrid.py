"""Families of decoders some of whose layers have recurrent states in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, LayerNorms, ShortConvolution, TensorNames
from penstock.engines.openvino.family import Settings, count, family, filled, plain

_LFM2_NAMES = TensorNames(
    norm="model.embedding_norm",
    o="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)
_LFM2_NORMS = LayerNorms("operator_norm", "", "ffn_norm")


@family("Lfm2ForCausalLM")
def lfm2(c: Settings) -> DecoderSpec:
    c = filled(c, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256)
    return _lfm2(c, _lfm2_mlp_size(c))


def _lfm2(c: Settings, mlp_size: int) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        rope_theta=1e6,
        conv_L_cache=3,
        tie_word_embeddings=c.get("tie_embedding", True),
    )
    spec = plain({**c, "intermediate_size": mlp_size}, eps_key="norm_eps")
    spec = spec.with_attention(qk_norm="each head", qkv_bias=False, o_bias=False).with_layers(norms=_LFM2_NORMS)
    convolution = ShortConvolution(_kernel(c), bool(c.get("conv_bias")))
    kinds = _lfm2_kinds(c)
    layers = [
        replace(layer, mixer=convolution) if kind == "conv" else layer
        for kind, layer in zip(kinds, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers), names=_LFM2_NAMES)


def _lfm2_mlp_size(c: Settings) -> int:
    """Two thirds of what is set, times a factor, rounded up to a multiple."""
    size = c["block_ff_dim"] if c.get("block_ff_dim") is not None else c["intermediate_size"]
    if not isinstance(size, int) or not c["block_auto_adjust_ff_dim"]:
        return int(size)
    size = int(2 * size / 3)
    factor, multiple = c["block_ffn_dim_multiplier"], count(c, "block_multiple_of")
    if factor is None or not multiple:
        return size
    return -(-int(factor * size) // multiple) * multiple


def _lfm2_kinds(c: Settings) -> Sequence[str]:
    """conv or full_attention, of each layer."""
    layers, kinds, attended = c["num_hidden_layers"], c.get("layer_types"), c.get("full_attn_idxs")
    if kinds is None:
        kinds = ["full_attention" if attended is None or n in attended else "conv" for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {"conv", "full_attention"}.issuperset(kinds):
        raise UnsupportedError(f"layer_types is not understood: {str(kinds)[:200]}; each has conv or full_attention")
    if "full_attention" not in kinds:
        raise UnsupportedError("no layer has full_attention: a model without attention is not supported")
    return kinds


def _kernel(c: Settings) -> int:
    size = count(c, "conv_L_cache")
    if not 1 <= size <= _LARGEST_KERNEL:
        raise UnsupportedError(
            f"config.json has conv_L_cache={size}, which is not a number from 1 to {_LARGEST_KERNEL}"
        )
    return size


_LARGEST_KERNEL = 64
"""Several times that of any known model."""
