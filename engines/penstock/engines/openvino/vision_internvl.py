"""The image encoder of InternVL: a vision transformer with a class token, which is left out behind it; the patches of a
small square are joined to one vector (pixel shuffle), and projected to the width of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, i64
from penstock.engines.openvino.vision import (
    UNEVEN,
    VisionGraph,
    VisionModel,
    attention,
    by_head,
    checked_activation,
    checked_number,
    checked_size,
    inner_settings,
    joined_squares,
    normalized,
)
from penstock.engines.openvino.weights import Weights

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_EPS, _QK_EPS = 1e-5, 1e-6
"""Of the projector's norm, and of those of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class InternVLVision(VisionModel):
    architectures = ("InternVLForConditionalGeneration",)
    prefixes = ("vision_tower.", "multi_modal_projector.")

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Activation
    norm: str
    norm_eps: float
    bias: bool
    """Of queries, keys and values."""
    qk_norm: bool
    ends_in_norm: bool
    side: int
    """Pixels of a tile."""
    patch: int
    """Pixels of a patch's side."""
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    projector_activation: Activation
    out_size: int
    """Of the decoder's hidden state."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> InternVLVision:
        vision, text = (inner_settings(settings, key) for key in ("vision_config", "text_config"))
        spec = cls(
            hidden_size=checked_size(vision, "hidden_size", 1024),
            intermediate_size=checked_size(vision, "intermediate_size", 4096),
            num_layers=checked_size(vision, "num_hidden_layers", 24),
            num_heads=checked_size(vision, "num_attention_heads", 16),
            activation=checked_activation(vision, "hidden_act", "gelu"),
            norm=str(vision.get("norm_type", "layer_norm")),
            norm_eps=checked_number(vision, "layer_norm_eps", 1e-6),
            bias=bool(vision.get("attention_bias", False)),
            qk_norm=bool(vision.get("use_qk_norm", False)),
            ends_in_norm=not vision.get("use_mean_pooling", True),
            side=_of_square(vision, "image_size", 448),
            patch=_of_square(vision, "patch_size", 14),
            joined=int(1 / checked_number(settings, "downsample_ratio", 0.5)),
            projector_activation=checked_activation(settings, "projector_hidden_act", "gelu"),
            out_size=checked_size(text, "hidden_size", 4096),
        )
        spec._check(settings, vision)
        return spec

    def _check(self, settings: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
        whole = self.joined and not self.side % (self.patch * self.joined) and not self.hidden_size % self.num_heads
        if not whole or vision.get("num_channels", 3) != 3:
            raise UnsupportedError(UNEVEN)
        expected = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        for key, usual in expected.items():
            if settings.get(key, usual) != usual:
                raise UnsupportedError(f"config.json has {key}={str(settings[key])[:50]} for its image encoder")
        if self.norm not in ("layer_norm", "rms_norm") or not vision.get("use_absolute_position_embeddings", True):
            raise UnsupportedError("config.json has an image encoder with other norms, or without positions")

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.patch * self.joined, self.side)

    def graph(self, weights: Weights) -> ov.Model:
        tile = ops.parameter([1, self.side, self.side, 3], np.uint8)
        builder, prefix, size = _InternVLGraph(self, weights), "multi_modal_projector.", self.hidden_size
        columns = i64([self.side // self.patch // self.joined])
        x, size = joined_squares(builder.encoded(tile), columns, self.joined, size), size * self.joined**2
        x = builder.layer_norm(x, prefix + "layer_norm", size, _EPS)
        x = ACTIVATIONS[self.projector_activation](builder.linear(x, prefix + "linear_1", self.out_size, size))
        x = builder.linear(x, prefix + "linear_2", self.out_size, self.out_size)
        return ov.Model([ops.result(x)], [tile], "image encoder")


class _InternVLGraph(VisionGraph):
    def __init__(self, spec: InternVLVision, weights: Weights) -> None:
        super().__init__(weights)
        self._spec = spec

    def encoded(self, tile: Node) -> Node:
        """[patches of the tile, hidden size], of a tile [1, side, side, 3] u8."""
        spec, prefix, size = self._spec, "vision_tower.embeddings.", self._spec.hidden_size
        name, count = prefix + "patch_embeddings.projection", (spec.side // spec.patch) ** 2
        x = self.patches(normalized(tile, _MEAN, _DEVIATION), name, size, spec.patch)
        x = ops.transpose(ops.reshape(x, i64([size, -1]), False), i64([1, 0]))
        x = ops.add(x, self.weights.vector(name + ".bias", size))
        of_class = ops.reshape(self.weights.table(prefix + "cls_token", (1, 1, size)), i64([1, size]), False)
        places = self.weights.table(prefix + "position_embeddings", (1, count + 1, size))
        x = ops.add(ops.concat([of_class, x], 0), ops.reshape(places, i64([-1, size]), False))
        for n in range(spec.num_layers):
            x = self._layer(x, f"vision_tower.encoder.layer.{n}.")
        if spec.ends_in_norm:
            x = self.layer_norm(x, "vision_tower.layernorm", size, spec.norm_eps)
        return ops.slice(x, i64([1]), i64([count + 1]), i64([1]), i64([0]))

    def _layer(self, x: Node, prefix: str) -> Node:
        spec, size, inner = self._spec, self._spec.hidden_size, self._spec.intermediate_size
        y = self._norm(x, prefix + "layernorm_before")
        q, k, v = (self.linear(y, f"{prefix}attention.{name}_proj", size, size, bias=spec.bias) for name in "qkv")
        if spec.qk_norm:
            q, k = (self.rms_norm(y, f"{prefix}attention.{n}_norm", size, _QK_EPS) for n, y in (("q", q), ("k", k)))
        q, k, v = (by_head(rows, spec.num_heads, size // spec.num_heads) for rows in (q, k, v))
        y = self.linear(attention(q, k, v, size), prefix + "attention.projection_layer", size, size)
        x = ops.add(x, ops.multiply(y, self.weights.vector(prefix + "lambda_1", size)))
        y = self.linear(self._norm(x, prefix + "layernorm_after"), prefix + "mlp.fc1", inner, size)
        y = self.linear(ACTIVATIONS[spec.activation](y), prefix + "mlp.fc2", size, inner)
        return ops.add(x, ops.multiply(y, self.weights.vector(prefix + "lambda_2", size)))

    def _norm(self, x: Node, name: str) -> Node:
        norm = self.rms_norm if self._spec.norm == "rms_norm" else self.layer_norm
        return norm(x, name, self._spec.hidden_size, self._spec.norm_eps)


def _of_square(settings: Mapping[str, Any], key: str, usual: int) -> int:
    """A length that may be written twice. Raises UnsupportedError."""
    length = settings.get(key, usual)
    if isinstance(length, list) and len(length) == 2 and length[0] == length[1]:
        length = length[0]
    return checked_size({key: length}, key)
