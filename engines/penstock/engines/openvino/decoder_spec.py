"""What a decoder's graph depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engines.openvino.rope import Rope

QKNorm = Literal["", "each head", "all heads"]
"""Whether queries and keys are normed before they are rotated, and over what."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Of the MLP's gate."""


@dataclass(frozen=True)
class LayerNorms:
    """What a layer's norms are called in the checkpoint; "": there is none in this place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    """Before its output is added, as `after_mlp`."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of one decoder: all that its graph depends on, beside the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    ropes: tuple[Rope | None, ...]
    """For each layer; layers with the same angles have the same object. None: queries and keys stay as they are."""
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    """For each layer, how many tokens it attends to, the token itself included; 0: all before it."""
    query_scale: float
    """Of the products of queries and keys."""
    activation: str
    """One of `ACTIVATIONS`."""
    embedding_scale: float
    """Of the embeddings, not of a head that is tied to them."""
    norms: LayerNorms
    norm_offset: float
    """Added to the weights of all norms."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm
    residual_scale: float = 1.0
    """Of what attention and MLP add."""
    logits_scale: float = 1.0
    fused: bool = False
    """One matrix for queries, keys and values, and one for the MLP's gate and its other half."""
