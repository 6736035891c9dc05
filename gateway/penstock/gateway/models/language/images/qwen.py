"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a picture keeps its shape, and takes as many tokens as it has
squares of pixels.

Source of the rules: `transformers`' Qwen2VLImageProcessorPil, and the processors that use it. Imports nothing of the
server's: the process that decodes images uses it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

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

_BICUBIC = 3
_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
_COARSE = 512 * 512
_LONGEST = 200
"""Times as long as the other may a side be."""


@dataclass(frozen=True)
class QwenImages(ImageFamily):
    architectures: ClassVar[tuple[str, ...]] = (
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    )
    marker = token = "<|image_pad|>"

    least: int
    """Pixels of a picture; smaller ones are enlarged."""
    most: int
    resample: int
    """Pillow's number of a filter."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> QwenImages:
        vision = settings.get("vision_config") or {}
        cls._check_values(processor)
        patch, joined = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
        cell = int(vision.get("patch_size", cls._usual_patch())) * int(vision.get("spatial_merge_size", 2))
        size = processor.get("size") or {}
        least = int(processor.get("min_pixels") or size.get("shortest_edge", _LEAST))
        most = int(processor.get("max_pixels") or size.get("longest_edge", _MOST))
        if patch * joined != cell or not cell**2 <= most or not 0 < least <= most:
            raise ValueError("the sizes of images and of the encoder differ")
        return cls(cell, 0, least, most, resample_of(processor, _BICUBIC))

    @classmethod
    def _check_values(cls, processor: Mapping[str, Any]) -> None:
        check_values(processor, *CLIP_VALUES)

    @classmethod
    def _usual_patch(cls) -> int:
        return 14

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        width, height = picture.size
        if max(width, height) > _LONGEST * min(width, height):
            raise RefusedImageError(f"one side is more than {_LONGEST} times as long as the other")
        size = self._filled(width, height)
        return Tiles([picture.resize(size, Image.Resampling(self.resample))])

    def _filled(self, width: int, height: int) -> tuple[int, int]:
        """The nearest size that cells fill, of no fewer and no more pixels than there may be."""
        cell = self.cell
        wide, high = round(width / cell) * cell, round(height / cell) * cell
        if wide * high > self.most:
            factor = math.sqrt(height * width / self.most)
            sides = (max(cell, math.floor(side / factor / cell) * cell) for side in (width, height))
        elif wide * high < self.least:
            factor = math.sqrt(self.least / (height * width))
            sides = (math.ceil(side * factor / cell) * cell for side in (width, height))
        else:
            return wide, high
        wide, high = sides
        return wide, high

    def text(self, image: PreparedImage) -> str:
        return self.token * self.tokens(image.tiles[0])

    def coarse(self) -> QwenImages:
        most = max(min(self.most, _COARSE), self.cell**2)
        return replace(self, most=most, least=min(self.least, most))


@dataclass(frozen=True)
class Qwen3Images(QwenImages):
    """Colours become values from -1 to 1."""

    architectures = (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )

    @classmethod
    def _check_values(cls, processor: Mapping[str, Any]) -> None:
        check_values(processor)

    @classmethod
    def _usual_patch(cls) -> int:
        return 16
