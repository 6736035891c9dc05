"""The image encoder of Idefics 3 and SmolVLM: SigLIP's vision transformer; the patches of a small square are joined to
one vector (pixel shuffle), and projected to the width of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.graph_nodes import i64
from penstock.engines.openvino.vision import UNEVEN, VisionModel, checked_size, inner_settings, joined_squares
from penstock.engines.openvino.vision_siglip import SIGLIP_DEFAULTS, Siglip, SiglipGraph
from penstock.engines.openvino.weights import Weights

_VISION, _PROJECTION = "vision_model.", "connector.modality_projection.proj.weight"
_DEFAULTS = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


@dataclass(frozen=True)
class Idefics3Vision(VisionModel):
    architectures = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
    prefixes = (_VISION, _PROJECTION)

    siglip: Siglip
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    out_size: int
    """Of the decoder's hidden state."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Idefics3Vision:
        siglip = Siglip.of(inner_settings(settings, "vision_config"), _DEFAULTS)
        joined = checked_size(settings, "scale_factor", 2)
        if siglip.patches % joined:
            raise UnsupportedError(UNEVEN)
        return cls(siglip, joined, checked_size(inner_settings(settings, "text_config"), "hidden_size"))

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.siglip.patch * self.joined, self.siglip.side)

    def graph(self, weights: Weights) -> ov.Model:
        side, size = self.siglip.side, self.siglip.hidden_size * self.joined**2
        tile = ops.parameter([1, side, side, 3], np.uint8)
        x = SiglipGraph(self.siglip, weights, _VISION).encoded(tile)
        x = joined_squares(x, i64([self.siglip.patches // self.joined]), self.joined, self.siglip.hidden_size)
        x = weights.project(x, _PROJECTION, (self.out_size, size))
        return ov.Model([ops.result(x)], [tile], "image encoder")
