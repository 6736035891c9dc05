"""The image encoder of LFM2-VL: SigLIP 2's vision transformer for tiles of any size (NaFlex); the patches of a small
square are joined to one vector (pixel unshuffle), and projected to the width of the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.batch import Floats
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, i64, parts
from penstock.engines.openvino.vision import (
    HALVES,
    UNEVEN,
    VisionModel,
    checked_activation,
    checked_size,
    inner_settings,
    joined_squares,
    normalized,
)
from penstock.engines.openvino.vision_siglip import SIGLIP_DEFAULTS, Siglip, SiglipGraph
from penstock.engines.openvino.weights import Weights

_EPS = 1e-5
"""Of the projector's norm."""


@dataclass(frozen=True, kw_only=True)
class Lfm2Vision(VisionModel):
    architectures = ("Lfm2VlForConditionalGeneration",)
    prefixes = ("vision_tower.", "multi_modal_projector.")

    siglip: Siglip
    """Of a square with all of the positions that it has weights for."""
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    inner_size: int
    activation: Activation
    bias: bool
    """Of the projector."""
    norms: bool
    """Its vectors are normed first."""
    out_size: int
    """Of the decoder's hidden state."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Lfm2Vision:
        vision, text = (inner_settings(settings, key) for key in ("vision_config", "text_config"))
        places = math.isqrt(checked_size(vision, "num_patches", 256))
        if places**2 != vision.get("num_patches", 256) or settings.get("vision_feature_layer", -1) != -1:
            raise UnsupportedError(UNEVEN)
        side = places * checked_size(vision, "patch_size", 16)
        return cls(
            siglip=Siglip.of({**vision, "image_size": side}, SIGLIP_DEFAULTS),
            joined=checked_size(settings, "downsample_factor", 2),
            inner_size=checked_size(settings, "projector_hidden_size", 2560),
            activation=checked_activation(settings, "projector_hidden_act", "gelu"),
            bias=bool(settings.get("projector_bias", True)),
            norms=bool(settings.get("projector_use_layernorm", True)),
            out_size=checked_size(text, "hidden_size", 2560),
        )

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.siglip.patch * self.joined)

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Behind it how positions are mixed of those that there are weights for: [rows, places], [columns, places]."""
        return [tile, *(_mixture(length // self.siglip.patch, self.siglip.patches) for length in tile.shape[1:3])]

    def graph(self, weights: Weights) -> ov.Model:
        tile = ops.parameter(ov.PartialShape([1, -1, -1, 3]), np.uint8)
        mixtures = [ops.parameter([-1, self.siglip.patches], np.float32) for _ in ("rows", "columns")]
        builder, size = _Siglip2Graph(self.siglip, weights, "vision_tower."), self.siglip.hidden_size
        x, columns = builder.of_any_size(tile, *mixtures)
        x, joined = joined_squares(x, ops.divide(columns, i64([self.joined])), self.joined, size), size * self.joined**2
        prefix = "multi_modal_projector."
        if self.norms:
            x = builder.layer_norm(x, prefix + "layer_norm", joined, _EPS)
        x = builder.linear(x, prefix + "linear_1", self.inner_size, joined, bias=self.bias)
        x = ACTIVATIONS[self.activation](x)
        x = builder.linear(x, prefix + "linear_2", self.out_size, self.inner_size, bias=self.bias)
        return ov.Model([ops.result(x)], [tile, *mixtures], "image encoder")


class _Siglip2Graph(SiglipGraph):
    def of_any_size(self, tile: Node, rows: Node, columns: Node) -> tuple[Node, Node]:
        """[patches, hidden size], of a tile [1, height, width, 3] u8, and [1], how many columns of them there are.
        `rows`, `columns`: as `Lfm2Vision.inputs` has them."""
        spec, prefix, size = self._spec, self._prefix + "embeddings.", self._spec.hidden_size
        counts = [parts(ops.shape_of(mixture), (1, 1), 0)[0] for mixture in (rows, columns)]
        patch = i64([spec.patch])
        # a patch has its pixels line by line, each with its three values
        x = ops.transpose(normalized(tile, HALVES, HALVES), i64([0, 2, 3, 1]))
        x = ops.reshape(x, ops.concat([counts[0], patch, counts[1], i64([3 * spec.patch])], 0), False)
        x = ops.reshape(ops.transpose(x, i64([0, 2, 1, 3])), i64([-1, 3 * spec.patch**2]), False)
        x = self.linear(x, prefix + "patch_embedding", size, 3 * spec.patch**2)
        places = self.weights.table(prefix + "position_embedding.weight", (spec.patches**2, size))
        mixed = ops.matmul(rows, ops.reshape(places, i64([spec.patches, -1]), False), False, False)
        mixed = ops.matmul(columns, ops.reshape(mixed, i64([-1, spec.patches, size]), False), False, False)
        return self.transformed(ops.add(x, ops.reshape(mixed, i64([-1, size]), False))), counts[1]


def _mixture(count: int, places: int) -> Floats:
    """[count, places]: shares of `places` values in each of `count`, as bilinear, antialiased resizing has them."""
    scale = places / count
    centers = (np.arange(count) + 0.5) * scale - 0.5
    shares = np.clip(1 - np.abs(np.arange(places) - centers[:, None]) / max(scale, 1), 0, None)
    return np.asarray(shares / shares.sum(1, keepdims=True), np.float32)
