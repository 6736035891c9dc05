"""Images of Gemma 3: one square tile of the whole picture.

Source of the rules: `transformers`' Gemma3Processor, with its image processor for PIL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage, Tiles, check_values, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_BEGIN, _TOKEN, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_BILINEAR = 2


@dataclass(frozen=True)
class Gemma3Images(ImageFamily):
    architectures = ("Gemma3ForConditionalGeneration",)
    marker, token = _BEGIN, _TOKEN
    newlines = 2

    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma3Images:
        check_values(processor)
        if processor.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan")
        side, size = int(settings["vision_config"]["image_size"]), processor["size"]
        row = math.isqrt(int(settings.get("mm_tokens_per_image", 256)))
        if (size["height"], size["width"]) != (side, side) or side % row:
            raise ValueError("the sizes of images and of the encoder differ")
        return cls(side // row, side, resample_of(processor, _BILINEAR))

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        return Tiles([picture.resize((self.side, self.side), Image.Resampling(self.resample))])

    def text(self, image: PreparedImage) -> str:
        return _BEGIN + _TOKEN * self.tokens(image.tiles[0]) + _END
