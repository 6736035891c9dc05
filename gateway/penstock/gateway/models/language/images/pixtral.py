"""Images of Pixtral, Mistral Small 3 and Ministral 3: one tile of the picture, in lines of tokens.

Source of the rules: `transformers`' PixtralProcessor, with its image processor for PIL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import (
    CLIP_VALUES,
    ImageFamily,
    PreparedImage,
    RefusedImageError,
    Tiles,
    check_values,
    resample_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_TOKEN, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_BICUBIC = 3
_LARGEST = 4096
"""Pixels of a side: no published model is shown so many."""


@dataclass(frozen=True)
class PixtralImages(ImageFamily):
    architectures = ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")
    marker = token = _TOKEN

    longest: int
    """Neither side becomes longer, but for the cells that fill it."""
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> PixtralImages:
        vision = settings["vision_config"]
        if vision.get("model_type") != "pixtral":
            raise ValueError(f"the encoder is of the type {vision.get('model_type')}")
        check_values(processor, *CLIP_VALUES)
        merges = "Mistral3ForConditionalGeneration" in settings["architectures"]
        cell = int(vision["patch_size"]) * (int(settings.get("spatial_merge_size", 2)) if merges else 1)
        longest = int(processor["size"]["longest_edge"])
        if not 1 <= longest <= _LARGEST or cell < 1:
            raise ValueError(f"size={longest}, patches of {cell}")
        return cls(cell, 0, longest, resample_of(processor, _BICUBIC))

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        width, height = picture.size
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = (math.floor(length / ratio) for length in (width, height))
        if not width or not height:
            raise RefusedImageError("it is too narrow")
        size = tuple(math.ceil(length / self.cell) * self.cell for length in (width, height))
        return Tiles([picture.resize((size[0], size[1]), Image.Resampling(self.resample))])

    def text(self, image: PreparedImage) -> str:
        height, width = image.tiles[0]
        line = _TOKEN * (width // self.cell)
        return _BREAK.join([line] * (height // self.cell)) + _END
