"""The image encoder of Pixtral, Mistral Small 3 and Ministral 3: patches of a picture of any size, turned by row and
column. Mistral's newer models join the patches of a small square to one (patch merger)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, i64, parts
from penstock.engines.openvino.vision import (
    CLIP,
    UNEVEN,
    VisionGraph,
    VisionModel,
    attention,
    by_head,
    checked_activation,
    checked_number,
    checked_size,
    inner_settings,
    normalized,
    rotated,
)
from penstock.engines.openvino.weights import Weights

_EPS = 1e-5
"""Of the encoder's norms."""


@dataclass(frozen=True, kw_only=True)
class PixtralVision(VisionModel):
    architectures = ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")
    prefixes = ("vision_tower.", "multi_modal_projector.")

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Activation
    theta: float
    patch: int
    """Pixels of a patch's side."""
    joined: int
    """So many patches in a row, and in a column, become one vector. 0: there is no merger."""
    merged_eps: float
    projector_activation: Activation
    projector_bias: bool
    out_size: int
    """Of the decoder's hidden state."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PixtralVision:
        vision, text = (inner_settings(settings, key) for key in ("vision_config", "text_config"))
        merges = "Mistral3ForConditionalGeneration" in settings["architectures"]
        takes = settings.get("vision_feature_layer", -1 if merges else -2)
        if vision.get("model_type", "pixtral" if merges else None) != "pixtral" or takes != -1:
            raise UnsupportedError("config.json has an image encoder that is not Pixtral's, or takes some layers of it")
        if not merges and settings.get("vision_feature_select_strategy") != "full":
            raise UnsupportedError("config.json has an image encoder without its first patch")
        rope = inner_settings(vision, "rope_parameters") or vision
        hidden, heads = checked_size(vision, "hidden_size", 1024), checked_size(vision, "num_attention_heads", 16)
        if hidden % heads or hidden // heads % 4 or vision.get("num_channels", 3) != 3:
            raise UnsupportedError(UNEVEN)
        return cls(
            hidden_size=hidden,
            intermediate_size=checked_size(vision, "intermediate_size", 4096),
            num_layers=checked_size(vision, "num_hidden_layers", 24),
            num_heads=heads,
            activation=checked_activation(vision, "hidden_act", "gelu"),
            theta=checked_number(rope, "rope_theta", 1e4),
            patch=checked_size(vision, "patch_size", 16),
            joined=checked_size(settings, "spatial_merge_size", 2) if merges else 0,
            merged_eps=checked_number(text, "rms_norm_eps", 1e-6),
            projector_activation=checked_activation(settings, "projector_hidden_act", "gelu"),
            projector_bias=bool(settings.get("multimodal_projector_bias", not merges)),
            out_size=checked_size(text, "hidden_size", 4096),
        )

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.patch * (self.joined or 1))

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Behind it cos and sin of every patch's angles, [patches, size of a head]: in the graph they would be computed
        in bf16, which is not exact enough."""
        d = self.hidden_size // self.num_heads
        frequencies = self.theta ** (-np.arange(0, d, 2) / d)
        rows, columns = np.indices((tile.shape[1] // self.patch, tile.shape[2] // self.patch)).reshape(2, -1, 1)
        angles = np.concatenate([rows * frequencies[0::2], columns * frequencies[1::2]] * 2, axis=1)
        return [tile, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]

    def graph(self, weights: Weights) -> ov.Model:
        tile = ops.parameter(ov.PartialShape([1, -1, -1, 3]), np.uint8)
        turns = [ops.parameter([-1, self.hidden_size // self.num_heads], np.float32) for _ in ("cos", "sin")]
        builder, size, out = _PixtralGraph(self, weights, turns), self.hidden_size, self.out_size
        x, rows, columns = builder.encoded(tile)
        prefix = "multi_modal_projector."
        if self.joined:
            x = builder.rms_norm(x, prefix + "norm", size, self.merged_eps)
            x = self._joined(x, rows, columns)
            x = builder.linear(x, prefix + "patch_merger.merging_layer", size, size * self.joined**2, bias=False)
        x = builder.linear(x, prefix + "linear_1", out, size, bias=self.projector_bias)
        x = ACTIVATIONS[self.projector_activation](x)
        x = builder.linear(x, prefix + "linear_2", out, out, bias=self.projector_bias)
        return ov.Model([ops.result(x)], [tile, *turns], "image encoder")

    def _joined(self, x: Node, rows: Node, columns: Node) -> Node:
        """[patches, hidden size] to [tokens, hidden size * joined * joined]: a patch's values are far apart."""
        few, size = i64([self.joined]), i64([self.hidden_size])
        shape = [ops.divide(rows, few), few, ops.divide(columns, few), few, size]
        x = ops.transpose(ops.reshape(x, ops.concat(shape, 0), False), i64([0, 2, 4, 1, 3]))
        return ops.reshape(x, i64([-1, self.hidden_size * self.joined**2]), False)


class _PixtralGraph(VisionGraph):
    def __init__(self, spec: PixtralVision, weights: Weights, turns: Sequence[Node]) -> None:
        """`turns`: the last of `PixtralVision.inputs`."""
        super().__init__(weights)
        self._spec = spec
        self._turns = turns

    def encoded(self, tile: Node) -> tuple[Node, Node, Node]:
        """[patches, hidden size], and [1], how many rows and columns of them there are."""
        spec, prefix, size = self._spec, "vision_tower.", self._spec.hidden_size
        x = self.patches(normalized(tile, *CLIP), prefix + "patch_conv", size, spec.patch)
        rows, columns = parts(ops.shape_of(x), (1, 1, 1, 1), 0)[2:]
        x = ops.transpose(ops.reshape(x, i64([size, -1]), False), i64([1, 0]))
        x = self.rms_norm(x, prefix + "ln_pre", size, _EPS)
        for n in range(spec.num_layers):
            x = self._layer(x, f"{prefix}transformer.layers.{n}.")
        return x, rows, columns

    def _layer(self, x: Node, prefix: str) -> Node:
        spec, size, inner = self._spec, self._spec.hidden_size, self._spec.intermediate_size
        y = self.rms_norm(x, prefix + "attention_norm", size, _EPS)
        q, k, v = (self.linear(y, f"{prefix}attention.{name}_proj", size, size, bias=False) for name in "qkv")
        q, k, v = (by_head(rows, spec.num_heads, size // spec.num_heads) for rows in (q, k, v))
        y = attention(self._turned(q), self._turned(k), v, size)
        x = ops.add(x, self.linear(y, prefix + "attention.o_proj", size, size, bias=False))
        y = self.rms_norm(x, prefix + "ffn_norm", size, _EPS)
        prefix += "feed_forward."
        gate, up = (self.linear(y, f"{prefix}{name}_proj", inner, size, bias=False) for name in ("gate", "up"))
        y = ops.multiply(ACTIVATIONS[spec.activation](gate), up)
        return ops.add(x, self.linear(y, prefix + "down_proj", size, inner, bias=False))

    def _turned(self, x: Node) -> Node:
        cos, sin = self._turns
        return rotated(x, cos, sin, self._spec.hidden_size // self._spec.num_heads)
