"""Images of Gemma 4: a picture keeps its shape, and takes as many tokens as its budget has room for.

Source of the rules: `transformers`' Gemma4Processor, with its image processor for PIL. The one of the models without an
encoder (unified) resizes with torchvision, a little differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import (
    ImageFamily,
    PreparedImage,
    RefusedImageError,
    Tiles,
    check_values,
    resample_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_UNIFIED = "Gemma4UnifiedForConditionalGeneration"
_TOKEN, _BEGIN, _END = "<|image|>", "<|image>", "<image|>"
_BICUBIC = 3
_COARSE, _MOST = 70, 1120
"""The smallest and the largest budget that these models were trained with."""
_BLACK, _WHITE = (0.0,) * 3, (1.0,) * 3


@dataclass(frozen=True)
class Gemma4Images(ImageFamily):
    architectures = ("Gemma4ForConditionalGeneration", _UNIFIED)
    marker = token = _TOKEN

    most: int
    """Tokens of a picture. Small pictures are enlarged to nearly as many."""
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Images:
        check_values(processor, _BLACK, _WHITE)
        is_unified, vision = _UNIFIED in settings["architectures"], settings["vision_config"]
        cell, of_encoder = (
            int(part.get("patch_size", 16)) * int(part.get("pooling_kernel_size", 3)) for part in (processor, vision)
        )
        most = int(processor.get("max_soft_tokens", 280))
        positions = int(vision["mm_posemb_size"] if is_unified else vision["position_embedding_size"])
        if cell < 1 or cell != of_encoder:
            raise ValueError("the sizes of images and of the encoder differ")
        if not 1 <= most <= min(_MOST, positions // (1 if is_unified else int(vision["pooling_kernel_size"]))):
            raise ValueError(f"max_soft_tokens={most}")
        text = settings["text_config"]
        attends = text.get("use_bidirectional_attention", "vision" if is_unified else None) == "vision"
        if attends and most > int(text["sliding_window"]):
            raise ValueError("images have more tokens than the decoder's sliding window")
        return cls(cell, 0, most, resample_of(processor, _BICUBIC))

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        return Tiles([picture.resize(self._filled(*picture.size), Image.Resampling(self.resample))])

    def _filled(self, width: int, height: int) -> tuple[int, int]:
        """The largest size of nearly this shape that is within the budget, in whole cells."""
        factor = math.sqrt(self.most * self.cell**2 / (height * width))
        wide, high = (math.floor(factor * side / self.cell) for side in (width, height))
        if not high:
            wide, high = min(width // height, self.most), 1
        elif not wide:
            wide, high = 1, min(height // width, self.most)
        if not 1 <= wide * high <= self.most:
            raise RefusedImageError("it is too narrow")
        return wide * self.cell, high * self.cell

    def text(self, image: PreparedImage) -> str:
        return _BEGIN + _TOKEN * self.tokens(image.tiles[0]) + _END

    def coarse(self) -> Gemma4Images:
        return replace(self, most=min(self.most, _COARSE))
