"""The image encoder of Gemma 4: a transformer of the decoder's kind over patches of a picture of any size, turned by
row and column; the patches of a small square are averaged and projected to the width of the decoder. The models without
an encoder (unified) project the pixels of such a square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, f32, i64, parts, rms, scaled
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
    rotated,
)
from penstock.engines.openvino.weights import Weights

_TOWER, _PROJECTION = "vision_tower.", "embed_vision."
_BIDIRECTIONAL = "use_bidirectional_attention"
_LAYER_NORM_EPS = 1e-5


def _in_squares(tile: npt.NDArray[np.uint8], patch: int, joined: int) -> list[npt.NDArray[Any]]:
    """Patches of a tile [P, 3 * patch * patch], square by square; column and row of each [P]."""
    _, height, width, _ = tile.shape
    rows, columns = height // (patch * joined), width // (patch * joined)
    x = tile.reshape(rows, joined, patch, columns, joined, patch, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    places = np.indices((rows * joined, columns * joined)).reshape(2, rows, joined, columns, joined)
    row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return [np.ascontiguousarray(x).reshape(-1, 3 * patch**2), column, row]


class _Gemma4Images(VisionModel):
    patch: int
    joined: int

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.patch * self.joined)


def _attends(text: Mapping[str, Any], usual: str | None) -> bool:
    return bool(text.get(_BIDIRECTIONAL, usual) == "vision")


@dataclass(frozen=True, kw_only=True)
class Gemma4Vision(_Gemma4Images):
    architectures = ("Gemma4ForConditionalGeneration",)
    prefixes = (_TOWER, _PROJECTION)
    whole_in_windows = True

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: Activation
    norm_eps: float
    theta: float
    patch: int
    """Pixels of a patch's side."""
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    positions: int
    """Learned ones, of rows and of columns."""
    clips: bool
    """What goes into matrices and comes out of them has bounds."""
    standardizes: bool
    out_size: int
    """Of the decoder's hidden state."""
    whole_tiles: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gemma4Vision:
        vision, text = (inner_settings(settings, key) for key in ("vision_config", "text_config"))
        rope = inner_settings(vision, "rope_parameters")
        spec = cls(
            hidden_size=checked_size(vision, "hidden_size", 768),
            intermediate_size=checked_size(vision, "intermediate_size", 3072),
            num_layers=checked_size(vision, "num_hidden_layers", 16),
            num_heads=checked_size(vision, "num_attention_heads", 12),
            head_dim=checked_size(vision, "head_dim", 64),
            activation=checked_activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
            norm_eps=checked_number(vision, "rms_norm_eps", 1e-6),
            theta=checked_number(rope, "rope_theta", 100.0),
            patch=checked_size(vision, "patch_size", 16),
            joined=checked_size(vision, "pooling_kernel_size", 3),
            positions=checked_size(vision, "position_embedding_size", 10240),
            clips=bool(vision.get("use_clipped_linears")),
            standardizes=bool(vision.get("standardize")),
            out_size=checked_size(text, "hidden_size", 2304),
            whole_tiles=_attends(text, None),
        )
        if spec.head_dim % 4 or vision.get("num_key_value_heads", spec.num_heads) != spec.num_heads:
            raise UnsupportedError(UNEVEN)
        if rope.get("rope_type", "axial") not in ("axial", "default") or vision.get("attention_bias"):
            raise UnsupportedError("config.json has an image encoder that turns patches otherwise, or adds to them")
        return spec

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """What `_in_squares` gives; cos and sin of every patch's angles [P, size of a head]: in the graph they would be
        computed in bf16, which is not exact enough."""
        patches, *places = _in_squares(tile, self.patch, self.joined)
        half = self.head_dim // 2
        frequencies = np.float32(self.theta) ** (-np.arange(0, half, 2).astype(np.float32) / np.float32(half))
        turns = [place[:, None].astype(np.float32) * np.tile(frequencies, 2) for place in places]
        angles = np.concatenate(turns, 1)
        return [patches, *places, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]

    def graph(self, weights: Weights) -> ov.Model:
        patches = ops.parameter([-1, 3 * self.patch**2], np.uint8)
        places = [ops.parameter([-1], np.int64) for _ in ("column", "row")]
        turns = [ops.parameter([-1, self.head_dim], np.float32) for _ in ("cos", "sin")]
        x = _Gemma4Graph(self, weights, turns[0], turns[1]).encoded(patches, places)
        size, squares = self.hidden_size, i64([-1, self.joined**2, self.hidden_size])
        x = scaled(ops.reduce_mean(ops.reshape(x, squares, False), i64([1]), False), size**0.5)
        if self.standardizes:
            x = ops.subtract(x, weights.vector(_TOWER + "std_bias", size))
            x = ops.multiply(x, weights.vector(_TOWER + "std_scale", size))
        name = _PROJECTION + "embedding_projection.weight"
        x = weights.project(rms(x, self.norm_eps), name, (self.out_size, size))
        return ov.Model([ops.result(x)], [patches, *places, *turns], "image encoder")


class _Gemma4Graph(VisionGraph):
    def __init__(self, spec: Gemma4Vision, weights: Weights, cos: Node, sin: Node) -> None:
        """`cos`, `sin`: as `Gemma4Vision.inputs` has them."""
        super().__init__(weights)
        self._spec = spec
        halves = (spec.head_dim // 2,) * 2
        self._turns = list(zip(parts(cos, halves, 1), parts(sin, halves, 1), strict=True))

    def encoded(self, patches: Node, places: list[Node]) -> Node:
        """[P, hidden size]; `patches`, `places`: as `Gemma4Vision.inputs` has them."""
        spec, size, prefix = self._spec, self._spec.hidden_size, _TOWER + "patch_embedder."
        x = ops.subtract(scaled(ops.convert(patches, "f32"), 2 / 255), f32(1.0))
        x = self.linear(x, prefix + "input_proj", size, 3 * spec.patch**2, bias=False)
        tables = self.weights.table(prefix + "position_embedding_table", (2, spec.positions, size))
        for table, place in zip(parts(tables, (1, 1), 0), places, strict=True):
            x = ops.add(x, ops.gather(ops.squeeze(table, i64(0)), place, i64(0)))
        for n in range(spec.num_layers):
            x = self._layer(x, f"{_TOWER}encoder.layers.{n}.")
        return x

    def _layer(self, x: Node, prefix: str) -> Node:
        spec, inner = self._spec, self._spec.intermediate_size
        y = self._attention(self._norm(x, prefix + "input_layernorm"), prefix + "self_attn.")
        x = ops.add(x, self._norm(y, prefix + "post_attention_layernorm"))
        y = self._norm(x, prefix + "pre_feedforward_layernorm")
        gate, up = (self._clipped(y, f"{prefix}mlp.{name}_proj", inner, spec.hidden_size) for name in ("gate", "up"))
        y = ops.multiply(ACTIVATIONS[spec.activation](gate), up)
        y = self._clipped(y, prefix + "mlp.down_proj", spec.hidden_size, inner)
        return ops.add(x, self._norm(y, prefix + "post_feedforward_layernorm"))

    def _attention(self, x: Node, prefix: str) -> Node:
        spec, heads, d = self._spec, self._spec.num_heads, self._spec.head_dim
        wide = heads * d
        q, k, v = (self._clipped(x, f"{prefix}{name}_proj", wide, spec.hidden_size) for name in "qkv")
        q, k, v = (by_head(one, heads, d) for one in (q, k, v))
        q, k = (self._turned(self.rms_norm(y, f"{prefix}{n}_norm", d, spec.norm_eps)) for n, y in (("q", q), ("k", k)))
        # its scores are not scaled, those of `attention` are
        y = attention(scaled(q, d**0.5), k, rms(v, spec.norm_eps), wide)
        return self._clipped(y, prefix + "o_proj", spec.hidden_size, wide)

    def _turned(self, x: Node) -> Node:
        """One half of a head turns by columns, the other one by rows."""
        half = self._spec.head_dim // 2
        halves = zip(parts(x, (half, half), 3), self._turns, strict=True)
        return ops.concat([rotated(one, cos, sin, half) for one, (cos, sin) in halves], 3)

    def _clipped(self, x: Node, name: str, out: int, inner: int) -> Node:
        y = self.linear(self._bounded(x, name + ".input"), name + ".linear", out, inner, bias=False)
        return self._bounded(y, name + ".output")

    def _bounded(self, x: Node, name: str) -> Node:
        if not self._spec.clips:
            return x
        least, most = (self.weights.table(f"{name}_{end}", ()) for end in ("min", "max"))
        return ops.minimum(ops.maximum(x, least), most)

    def _norm(self, x: Node, name: str) -> Node:
        return self.rms_norm(x, name, self._spec.hidden_size, self._spec.norm_eps)


@dataclass(frozen=True, kw_only=True)
class Gemma4Unified(_Gemma4Images):
    """Without an encoder. In the decoder, tokens of an image attend to each other in all layers: so it is where
    transformers computes a prompt. Its masks for caches of fixed size, which it makes elsewhere, leave out layers
    without a window."""

    architectures = ("Gemma4UnifiedForConditionalGeneration",)
    prefixes = (_PROJECTION,)

    hidden_size: int
    norm_eps: float
    patch: int
    joined: int
    positions: int
    """Learned ones, of rows and of columns."""
    out_size: int
    """Of the decoder's hidden state."""
    whole_tiles: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gemma4Unified:
        vision, text = (inner_settings(settings, key) for key in ("vision_config", "text_config"))
        hidden = checked_size(vision, "mm_embed_dim", 3840)
        if vision.get("output_proj_dims", hidden) != hidden:
            raise UnsupportedError(UNEVEN)
        return cls(
            hidden_size=hidden,
            norm_eps=checked_number(vision, "rms_norm_eps", 1e-6),
            patch=checked_size(vision, "patch_size", 16),
            joined=checked_size(vision, "pooling_kernel_size", 3),
            positions=checked_size(vision, "mm_posemb_size", 1120),
            out_size=checked_size(text, "hidden_size", 2304),
            whole_tiles=_attends(text, "vision"),
        )

    def own_name(self, name: str) -> str | None:
        """Published files have other names than transformers' modules."""
        name = name.removeprefix("model.").replace("vision_embedder.", _PROJECTION)
        return super().own_name(name.replace(".multimodal_embedder.", "."))

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Squares [tokens, 3 * cell * cell], and column and row of each [tokens]."""
        return _in_squares(tile, self.grid.cell, 1)

    def graph(self, weights: Weights) -> ov.Model:
        size, pixels = self.hidden_size, 3 * self.grid.cell**2
        squares = ops.parameter([-1, pixels], np.uint8)
        places = [ops.parameter([-1], np.int64) for _ in ("column", "row")]
        graph = VisionGraph(weights)
        x = scaled(ops.convert(squares, "f32"), 1 / 255)
        x = graph.layer_norm(x, _PROJECTION + "patch_ln1", pixels, _LAYER_NORM_EPS)
        x = graph.linear(x, _PROJECTION + "patch_dense", size, pixels)
        x = graph.layer_norm(x, _PROJECTION + "patch_ln2", size, _LAYER_NORM_EPS)
        tables = weights.table(_PROJECTION + "pos_embedding", (self.positions, 2, size))
        for table, place in zip(parts(tables, (1, 1), 1), places, strict=True):
            x = ops.add(x, ops.gather(ops.squeeze(table, i64(1)), place, i64(0)))
        x = rms(graph.layer_norm(x, _PROJECTION + "pos_norm", size, _LAYER_NORM_EPS), self.norm_eps)
        x = weights.project(x, _PROJECTION + "embedding_projection.weight", (self.out_size, size))
        return ov.Model([ops.result(x)], [squares, *places], "image encoder")
