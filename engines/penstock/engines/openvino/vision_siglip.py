"""SigLIP's vision transformer, which several image encoders have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, i64
from penstock.engines.openvino.vision import (
    HALVES,
    UNEVEN,
    VisionGraph,
    attention,
    by_head,
    checked_activation,
    checked_number,
    checked_size,
    normalized,
)
from penstock.engines.openvino.weights import Weights

SIGLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""What settings mean that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Siglip:
    """A vision transformer: a square tile is cut into patches, which attend to each other."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Activation
    norm_eps: float
    side: int
    """Pixels of a tile."""
    patch: int
    """Pixels of a patch's side."""

    @classmethod
    def of(cls, vision: Mapping[str, Any], defaults: Mapping[str, Any]) -> Siglip:
        """`defaults`: what settings mean that config.json leaves out. Raises UnsupportedError."""
        vision = {**defaults, **vision}
        spec = cls(
            hidden_size=checked_size(vision, "hidden_size"),
            intermediate_size=checked_size(vision, "intermediate_size"),
            num_layers=checked_size(vision, "num_hidden_layers"),
            num_heads=checked_size(vision, "num_attention_heads"),
            activation=checked_activation(vision, "hidden_act", ""),
            norm_eps=checked_number(vision, "layer_norm_eps", 1e-6),
            side=checked_size(vision, "image_size"),
            patch=checked_size(vision, "patch_size"),
        )
        if spec.side % spec.patch or spec.hidden_size % spec.num_heads or vision["num_channels"] != 3:
            raise UnsupportedError(UNEVEN)
        return spec

    @property
    def patches(self) -> int:
        """In a row of a tile."""
        return self.side // self.patch


class SiglipGraph(VisionGraph):
    def __init__(self, spec: Siglip, weights: Weights, prefix: str) -> None:
        """`prefix`: of the names of all its tensors."""
        super().__init__(weights)
        self._spec = spec
        self._prefix = prefix

    def encoded(self, tile: Node) -> Node:
        """[patches of the tile, hidden size], of a tile [1, side, side, 3] u8."""
        spec, prefix, size = self._spec, self._prefix + "embeddings.", self._spec.hidden_size
        x = self.patches(normalized(tile, HALVES, HALVES), prefix + "patch_embedding", size, spec.patch)
        x = ops.transpose(ops.reshape(x, i64([size, -1]), False), i64([1, 0]))
        x = ops.add(x, self.weights.vector(prefix + "patch_embedding.bias", size))
        # transformers finds the rows by fractions in f32. For some numbers of patches, none of them in use, these are
        # rounded differently on different CPUs.
        x = ops.add(x, self.weights.table(prefix + "position_embedding.weight", (spec.patches**2, size)))
        return self.transformed(x)

    def transformed(self, x: Node) -> Node:
        """[patches, hidden size], with their positions, behind all layers and the norm."""
        for n in range(self._spec.num_layers):
            x = self._layer(x, f"{self._prefix}encoder.layers.{n}.")
        return self._norm(x, self._prefix + "post_layernorm")

    def _layer(self, x: Node, prefix: str) -> Node:
        spec, size, inner = self._spec, self._spec.hidden_size, self._spec.intermediate_size
        y = self._norm(x, prefix + "layer_norm1")
        q, k, v = (self.linear(y, f"{prefix}self_attn.{name}_proj", size, size) for name in "qkv")
        q, k, v = (by_head(rows, spec.num_heads, size // spec.num_heads) for rows in (q, k, v))
        x = ops.add(x, self.linear(attention(q, k, v, size), prefix + "self_attn.out_proj", size, size))
        y = self.linear(self._norm(x, prefix + "layer_norm2"), prefix + "mlp.fc1", inner, size)
        return ops.add(x, self.linear(ACTIVATIONS[spec.activation](y), prefix + "mlp.fc2", size, inner))

    def _norm(self, x: Node, name: str) -> Node:
        return self.layer_norm(x, name, self._spec.hidden_size, self._spec.norm_eps)
