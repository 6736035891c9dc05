"""The image encoder of Gemma 3: SigLIP's vision transformer, whose patches are averaged over small squares, normed and
projected to the width of the decoder. There, the tokens of an image attend to each other in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.graph_nodes import Node, i64
from penstock.engines.openvino.vision import UNEVEN, VisionModel, checked_size, inner_settings
from penstock.engines.openvino.vision_siglip import SIGLIP_DEFAULTS, Siglip, SiglipGraph
from penstock.engines.openvino.weights import Weights

_WINDOW = 4096
"""What config.json means that leaves it out."""


@dataclass(frozen=True)
class Gemma3Vision(VisionModel):
    architectures = ("Gemma3ForConditionalGeneration",)
    prefixes = ("vision_tower.", "multi_modal_projector.")
    whole_tiles = True

    siglip: Siglip
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    out_size: int
    """Of the decoder's hidden state."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gemma3Vision:
        siglip = Siglip.of(inner_settings(settings, "vision_config"), SIGLIP_DEFAULTS)
        text = inner_settings(settings, "text_config")
        side = math.isqrt(checked_size(settings, "mm_tokens_per_image", 256))
        if side > siglip.patches or siglip.patches % side:
            raise UnsupportedError(UNEVEN)
        if side * side > checked_size(text, "sliding_window", _WINDOW):
            raise UnsupportedError("config.json has images of more tokens than the decoder's sliding window")
        return cls(siglip, siglip.patches // side, checked_size(text, "hidden_size", 2304))

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.siglip.patch * self.joined, self.siglip.side)

    def graph(self, weights: Weights) -> ov.Model:
        size = self.siglip.hidden_size
        tile = ops.parameter([1, self.siglip.side, self.siglip.side, 3], np.uint8)
        graph = SiglipGraph(self.siglip, weights, "vision_tower.")
        x = self._averaged(graph.encoded(tile))
        prefix, eps = "multi_modal_projector.", self.siglip.norm_eps
        x = graph.rms_norm(x, prefix + "mm_soft_emb_norm", size, eps, plus=1.0)
        name = prefix + "mm_input_projection_weight"
        x = weights.project(x, name, (self.out_size, size), transposed=True)
        return ov.Model([ops.result(x)], [tile], "image encoder")

    def _averaged(self, x: Node) -> Node:
        """[patches of the tile, hidden size] to [tokens, hidden size]."""
        few, size = self.joined, self.siglip.hidden_size
        side = self.siglip.patches // few
        x = ops.reshape(x, i64([side, few, side, few, size]), False)
        return ops.reshape(ops.reduce_mean(x, i64([1, 3]), False), i64([side * side, size]), False)
