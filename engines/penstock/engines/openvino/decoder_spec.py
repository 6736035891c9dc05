"""What a decoder's graph depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.engines.openvino.rope import Rope

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu", "relu"]
"""Of MLPs, by the names that config.json has for them."""
QKNorm = Literal["", "each head", "all heads", "each head, weightless"]
"""Whether queries and keys are normed before they are rotated, and over what. Without weights, it is only those that
are rotated, and makes no difference whether before or after."""
NormKind = Literal["rms", "layer"]
"""A layer norm has a bias, an RMS norm has none."""
QKVRows = Literal["whole", "by key head"]
"""Order of the rows in a matrix of queries, keys and values: all queries, then all keys, then all values; or for each
head of keys its queries, its key and its value."""


@dataclass(frozen=True)
class LayerNorms:
    """What a layer's norms are called in the checkpoint; "": there is none in this place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    """Before its output is added, as `after_mlp`."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True)
class TensorNames:
    """What the checkpoint calls the parts of a decoder. "": there is no such part."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""
    """Of learned position embeddings."""
    layers: str = "model.layers"
    """In front of a layer's number; the names of norms, attention and MLP stand behind it."""
    norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name: one matrix has the rows of all three."""
    o: str = "o_proj"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The matrix whose result is activated, and the one whose result it is multiplied by. One name: one matrix has
    the rows of both, or there is just the first (`DecoderSpec.gated`)."""
    down: str = "down_proj"
    expert_gate_up: tuple[str, ...] = ()
    """As `gate_up`, of an expert; (): they are called the same."""
    router: str = "gate"
    """Of the experts; this and the next two stand behind `mlp`."""
    experts: str = "experts"
    shared_expert: str = "shared_expert"


@dataclass(frozen=True)
class QueryGrowth:
    """Queries of layers that do not rotate grow with their position p, by log(1 + floor((p + 1) / every)) * scale + 1
    (arXiv:2501.19399)."""

    every: int
    scale: float


@dataclass(frozen=True)
class Clamp:
    """GPT-OSS's way in front of an expert's last matrix: gate * sigmoid(alpha * gate) * (up + 1), with gate and up
    no farther from zero than `limit` (gate at its upper end alone). If one matrix has both, their columns alternate."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP: a router chooses a few for each token."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    """The weights of those that were chosen are made to sum to 1."""
    layers: tuple[bool, ...]
    """Which have experts; the others have an MLP."""
    shared_intermediate_size: int = 0
    """Of one more expert, which every token has; 0: there is none."""
    gated_share: bool = True
    """What that one adds is multiplied by a share of the token's own; else it is added as it is."""
    weighs_inputs: bool = False
    """Inputs of the chosen are multiplied by sigmoids of their scores, in place of results by their weights."""
    bias: bool = False
    """Of the router and the experts."""
    transposed: bool = False
    """Their matrices are stored as [in, out]."""
    clamp: Clamp | None = None


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
    norm_eps: float
    max_position_embeddings: int
    ropes: tuple[Rope | None, ...]
    """For each layer; layers with the same angles have the same object. None: queries and keys stay as they are."""
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    """For each layer, how many tokens it attends to, the token itself included; 0: all before it."""
    query_scale: float
    """Of the products of queries and keys."""
    activation: Activation
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
    names: TensorNames = field(default_factory=TensorNames)
    norm: NormKind = "rms"
    parallel: bool = False
    """Attention and MLP both get the layer's input, and their results are added to it."""
    gated: bool = True
    """Two matrices in front of the MLP's activation, not one."""
    qkv_rows: QKVRows = "whole"
    """If one matrix has them all."""
    alternating_pairs: bool = False
    """Values of a head that turn together are neighbours; else they are half a head apart."""
    query_growth: QueryGrowth | None = None
    transposed: bool = False
    """The matrices of the layers are stored as [in, out]."""
    alibi: bool = False
    """Attention falls off with distance, by a slope of each head (arXiv:2108.12409)."""
    sinks: bool = False
    """Each head has one more score among those of all tokens, which draws attention to nothing."""
    head_bias: bool = False
    experts: Experts | None = None
    score_cap: float = 0.0
    """Scores of attention become cap * tanh(score / cap); 0: they stay as they are."""
    logits_cap: float = 0.0
    """Likewise."""
