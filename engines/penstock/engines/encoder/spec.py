"""What an encoder is made of, as far as its graph depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.engines.openvino.rope import Rope


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec:
    """The layers behind the encoder that give logits."""

    num_labels: int
    pooling: Literal["cls", "mean"] = "cls"
    dense: str
    """The layer before the last one."""
    dense_bias: bool = True
    activation: str = "tanh"
    norm: str = ""
    """After the activation; "" for none."""
    norm_bias: bool = True
    out: str = "classifier"


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    max_tokens: int
    """Of a text, with its special tokens."""
    embedding_size: int
    """Of the token, position and type tables."""
    position_rows: int = 0
    """Rows of the table of positions; 0: there is none."""
    first_position: int = 0
    """Row of a text's first token."""
    type_rows: int = 0
    """Rows of the table of token types; 0: there is none."""
    distance_buckets: int = 0
    """Attention is biased by a table with a row for each bucket of distances; 0: it is not."""
    rotary: RotarySpec | None = None
    """Of ModernBERT: rotary positions, norms before each part, a gate in the MLP."""
    rename: Callable[[str], str | None]
    """From a checkpoint's names to the graph's; None for tensors that no part of the model uses."""
    classifier: ClassifierSpec | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    ropes: tuple[Rope, ...]
    """Of each layer."""
    windows: tuple[int, ...]
    """Of each layer: a token attends to those at most so far away; 0: to all."""
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
