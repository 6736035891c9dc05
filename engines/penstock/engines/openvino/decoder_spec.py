"""Specification of a decoder: all that its graph depends on, beside the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.engines.kit.cache_size import LayerGroup, group_layers
from penstock.engines.openvino.rope import Rope

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu", "relu", "relu2", "xielu"]
"""Of MLPs, by the names that config.json has for them. xielu has numbers of each layer (arXiv:2411.13010)."""
QKNorm = Literal["", "each head", "all heads", "each head, own weights", "each head, rotated", "each head, weightless"]
"""Whether queries and keys are normed, and over what: before they are rotated, or after it ("rotated"). Heads share
their weights, or each has its own. Without weights, it is only those that are rotated, and makes no difference whether
before or after."""
Scores = Literal["softmax", "sigmoid", "sparse mixer"]
NormKind = Literal["rms", "rms without weights", "layer", "layer without bias", "layer without weights"]
"""A layer norm subtracts the mean, and usually has a bias; an RMS norm has none. Without weights there is no bias
either."""
GatedNorm = Literal["gate first", "norm first", "gate alone"]
"""What becomes of a state space's result: it is multiplied by gates, then normed; or the other way round; or it is not
normed."""
QKVRows = Literal["whole", "by key head"]
"""Order of the rows in a matrix of queries, keys and values: all queries, then all keys, then all values; or for each
head of keys its queries, its key and its value."""


@dataclass(frozen=True)
class LayerNorms:
    """Names of a layer's norms in the checkpoint; "": there is none in this place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    """Before its output is added, as `after_mlp`."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    beside: tuple[str, str, str] = ("", "", "")
    """Where there are experts beside an MLP (`LayerSpec.beside`): behind the MLP, before experts, and behind them.
    `after_mlp` follows their sum."""


@dataclass(frozen=True)
class TensorNames:
    """Names of a decoder's parts in the checkpoint. "": there is no such part."""

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
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    attention_gate: str = ""
    """Of the matrix that gives gates (`Attention.gated`); "": that of queries does."""
    head_gate: str = "gate_proj"
    convolution: str = "conv"
    delta_net: str = "linear_attn"
    state_space: str = "mamba"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The matrix whose result is activated, and the one whose result it is multiplied by. One name: one matrix has
    the rows of both, or there is just the first (`MLP.gated`). Experts may have both in gate_up_proj."""
    down: str = "down_proj"
    expert_down: str = ""
    """As `down`, of an expert; "": it is called the same."""
    router: str = "gate"
    """Of the experts; this and the next three stand behind `mlp`, which may be "" for that."""
    correction: str = ""
    """What is added to the experts' scores where they are chosen, not where they are weighed; "": nothing."""
    experts: str = "experts"
    shared_expert: str = "shared_expert"
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position p, by log(1 + floor((p + first) / every)) * scale + 1 (arXiv:2501.19399)."""

    every: int
    scale: float
    first: int
    """0 or 1: the number of the first position."""


@dataclass(frozen=True)
class Latent:
    """Queries, keys and values come out of compressed ones (arXiv:2405.04434). They are kept as any other keys and
    values, each value with zeros behind it up to the size of a head."""

    query_rank: int
    """Size of the compressed query; 0: queries are not compressed."""
    rank: int
    """Size of what keys and values come out of."""
    rotated: int
    """Values of a head that are rotated, its last ones; all heads of keys have the same there."""
    value_size: int
    """Of a head's value."""
    norm_eps: float
    """Of the norms of what is compressed."""


@dataclass(frozen=True)
class Attention:
    """Paged attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Of the products of queries and keys."""
    rope: Rope | None
    """Layers with the same angles have the same object. None: queries and keys stay as they are."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm = ""
    qkv_rows: QKVRows = "whole"
    """If one matrix has them all."""
    alternating_pairs: bool = False
    """Values of a head that turn together are neighbours; else they are half a head apart."""
    growth: QueryGrowth | None = None
    alibi: bool = False
    """Scores fall off with distance, by a slope of each head (arXiv:2108.12409)."""
    sinks: bool = False
    """Each head has one more score among those of all tokens, which draws attention to nothing."""
    gated: bool = False
    """The result of each head is multiplied by the sigmoid of a gate. Without a matrix for gates, that of queries has
    them behind each head's queries."""
    gates_heads: bool = False
    """The head's result is multiplied by the sigmoid of a number of its own (`TensorNames.head_gate`)."""
    latent: Latent | None = None
    value_size: int = 0
    """Of a head's value, which is kept with zeros behind it up to the size of a head; 0: that is its size."""
    value_scale: float = 1.0
    limit: float = 0.0
    """Values of queries (behind a norm of all heads), keys and values are no farther from zero; 0: there is none."""
    norms_values: bool = False
    """Values of each head are normed, without weights."""
    has_values: bool = True
    """Else values are what keys are before their norm."""
    shares: int | None = None
    """The layer whose keys and values it attends to, in place of its own."""
    score_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: they stay as they are."""
    input_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def result_size(self) -> int:
        return self.num_heads * (self.value_size or self.head_dim)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MLP:
    intermediate_size: int
    activation: Activation
    gated: bool = True
    """Two matrices in front of the activation, not one."""
    bias: bool = False
    transposed: bool = False
    """Its matrices are stored as [in, out]."""
    gate_scale: float = 1.0
    """Of what is activated."""
    output_scale: float = 1.0
    sparsity: float = 0.0
    """So large a share of what the activation gets becomes 0, if it is distributed normally: what is less than mean and
    standard deviation say. The rest is what it is above that."""


@dataclass(frozen=True)
class Clamp:
    """GPT-OSS's way in front of an expert's last matrix: gate * sigmoid(alpha * gate) * (up + 1), with gate and up
    no farther from zero than `limit` (gate at its upper end alone). If one matrix has both, their columns alternate."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertGroups:
    """A token has experts of the best few groups only (arXiv:2405.04434)."""

    count: int
    """Each has equally many, neighbours."""
    chosen: int
    best: int
    """A group is as good as so many of its best experts together."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP: a router chooses a few for each token."""

    count: int
    per_token: int
    expert: MLP
    normalized: bool
    """The weights of those that were chosen are made to sum to 1."""
    scores: Scores = "softmax"
    """Weights, made of what the router gives. "sparse mixer": as Phi-3.5-MoE has it (arXiv:2310.00811)."""
    jitter: float = 0.0
    """Of the sparse mixer: twice as much, relative, is far."""
    least_sum: float = 0.0
    """That they are divided by, if they are normalized."""
    scale: float = 1.0
    """Of the weights, in the end."""
    shared: MLP | None = None
    """One more expert, which every token has."""
    gated_share: bool = True
    """What that one adds is multiplied by a share of the token's own; else it is added as it is, but for its scale."""
    shared_scale: float = 1.0
    weighs_inputs: bool = False
    """Inputs of the chosen are multiplied by sigmoids of their scores, in place of results by their weights."""
    groups: ExpertGroups | None = None
    router_bias: bool = False
    router_norm: bool = False
    """The router gets its input normed, with weights of its own, and each expert's weight is scaled by a number."""
    clamp: Clamp | None = None
    latent_size: int = 0
    """Experts, but not the shared one, compute in a space of this size: a matrix is in front of them, and one behind
    their sum (`TensorNames.latent`), with biases if the shared expert has some. 0: in that of the hidden state."""


@dataclass(frozen=True)
class ShortConvolution:
    """LFM2's recurrent layer. One matrix gives three values of each channel: the product of the first and the third is
    folded over the newest tokens, and the second multiplies the result."""

    kernel: int
    """Tokens."""
    bias: bool = False


@dataclass(frozen=True)
class DeltaNames:
    """Names of a delta net's parts in the checkpoint."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """One name: one matrix has the rows of queries, keys and values; `convolutions` likewise."""
    gate: str = "in_proj_z"
    beta: str = "in_proj_b"
    decay: str = "in_proj_a"
    convolutions: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"


@dataclass(frozen=True)
class GatedDelta:
    """Qwen3.5's recurrent layer, a gated delta net (arXiv:2412.06464). Queries, keys and values are folded over the
    newest tokens; a state of each head of values decays, and is corrected by each token."""

    key_heads: int
    """Those of queries, too; each is of several heads of values."""
    value_heads: int
    key_dim: int
    """Of a head."""
    value_dim: int
    kernel: int
    """Tokens."""
    names: DeltaNames = DeltaNames()
    by_key_head: bool = False
    """The matrix `DeltaNames.qkv` has for each head of keys its query, its key, and its values and their gates;
    `DeltaNames.beta` likewise has betas and decays."""
    tiled: bool = False
    """Heads of values that have the same head of keys are not neighbours: they are as many apart as there are heads of
    keys (llama.cpp's order)."""
    strength: float = 1.0
    """The largest beta."""
    norm_eps: float = 0.0
    """Of the norm behind the states; 0: that of the other norms."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of queries, keys and values, in all heads."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True)
class AltUp:
    """There are several hidden states (arXiv:2301.13310). A layer predicts all of them out of all, computes one, and
    corrects the others by what has become of it."""

    count: int
    active: int
    """The one that is computed."""
    scales_output: bool
    """Its values are scaled where they meet the layer's own embedding."""
    laurel_rank: int
    """Beside attention there is a product with two small matrices (arXiv:2411.07501)."""


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2's recurrent layer (arXiv:2405.21060). One matrix gives gates, then values, keys and queries, which are
    folded over the newest tokens, and a step of each head; the state of a head decays, and gets the value times the
    key. (The paper calls them z, x, B, C and dt.)"""

    heads: int
    head_dim: int
    groups: int
    """Of heads that have the same keys and queries."""
    state_dim: int
    """Of keys and queries."""
    kernel: int
    """Tokens."""
    bias: bool = False
    """Of its first matrix."""
    out_bias: bool = False
    """Of its last one."""
    kernel_bias: bool = True
    norm: GatedNorm = "gate first"
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0,) * 5
    """Of what the first matrix gives: gates, values, keys, queries and steps."""
    output_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of values, keys and queries."""
        keys = self.groups * self.state_dim
        return self.inner, keys, keys


Recurrent = ShortConvolution | GatedDelta | Mamba2
Mixer = Attention | Recurrent
"""The part of a layer that looks at other tokens."""


@dataclass(frozen=True)
class LayerSpec:
    mixer: Mixer | None
    mlp: MLP | Experts | None
    """None: the layer has the other part only."""
    norms: LayerNorms = LayerNorms()
    with_states: Mamba2 | None = None
    """It has attention, and this gets the same input; their results are added."""
    parallel: bool = False
    """Both parts get the layer's input, and their results are added to it."""
    beside: Experts | None = None
    """Experts, whose results are added to those of the MLP."""
    scaled: bool = False
    """What it gives is multiplied by a number of its own."""


@dataclass(frozen=True)
class LayerEmbeddings:
    """Each layer gets an embedding of the token that is its own, made of one in a table and of the token's hidden
    state; a gate of the layer's result multiplies it, and it is added to that."""

    vocab_size: int
    size: int
    activation: Activation
    token_of_images: int = 0
    """Its rows in the table are those of all tokens of images."""


@dataclass(frozen=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    position_offset: int = 0
    """Where position embeddings are learned: rows in front of that of the first position."""
    embedding_scale: float = 1.0
    """Of the embeddings, not of a head that is tied to them."""
    norm: NormKind = "rms"
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    residual_scale: float = 1.0
    """Of what the parts of a layer add."""
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    """As `Attention.score_cap`."""
    names: TensorNames = field(default_factory=TensorNames)
    transposed: bool = False
    """The matrices of the layers are stored as [in, out]."""
    head_bias: bool = False
    embeddings_of_layers: LayerEmbeddings | None = None
    altup: AltUp | None = None
    further_layers: int = 0
    """Of the checkpoint, behind the last one: for multi-token prediction, and not computed."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """`Attention.window` of each layer that has attention."""
        return tuple(layer.window for layer in self.attention.values())

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """`Attention.rope` of each layer that has attention."""
        return tuple(layer.rope for layer in self.attention.values())

    @property
    def attention(self) -> dict[int, Attention]:
        """By the layer's number."""
        return {n: layer.mixer for n, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def is_hybrid(self) -> bool:
        """Some layers have states, in place of keys and values or beside them."""
        return any(isinstance(part, Recurrent) for layer in self.layers for part in (layer.mixer, layer.with_states))

    @property
    def has_delta_nets(self) -> bool:
        """Or what is computed as such."""
        kinds = GatedDelta | Mamba2
        return any(isinstance(part, kinds) for layer in self.layers for part in (layer.mixer, layer.with_states))

    @property
    def groups(self) -> list[LayerGroup]:
        """Of the layers that have attention, by their numbers."""
        own = {n: layer for n, layer in self.attention.items() if layer.shares is None}
        numbers, layers = list(own), own.values()
        groups = group_layers([layer.window for layer in layers], [layer.kv_size for layer in layers])
        return [group._replace(layers=tuple(numbers[n] for n in group.layers)) for group in groups]

    def readers(self, group: LayerGroup) -> list[Attention]:
        """Attention of the layers that read the keys and values of a group."""
        layers = self.attention.items()
        return [layer for n, layer in layers if (n if layer.shares is None else layer.shares) in group.layers]

    @property
    def experts(self) -> Experts | None:
        """Of the first layer that has some; they are alike in all of them."""
        parts = (part for layer in self.layers for part in (layer.mlp, layer.beside))
        return next((part for part in parts if isinstance(part, Experts)), None)

    def with_layers(self, **changes: Any) -> DecoderSpec:
        """Fields of all layers changed."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    def with_attention(self, **changes: Any) -> DecoderSpec:
        """Fields of all layers' attention changed."""
        layers = list(self.layers)
        for n, attention in self.attention.items():
            layers[n] = replace(layers[n], mixer=replace(attention, **changes))
        return replace(self, layers=tuple(layers))

    def with_mlp(self, **changes: Any) -> DecoderSpec:
        """Fields of all layers' MLPs changed."""
        layers = [replace(layer, mlp=layer.mlp and replace(layer.mlp, **changes)) for layer in self.layers]
        return replace(self, layers=tuple(layers))
