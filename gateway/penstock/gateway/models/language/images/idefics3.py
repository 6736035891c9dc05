"""Images of Idefics 3 and SmolVLM: square tiles of an enlarged picture, and one of the whole picture.

Source of the rules: `transformers`' Idefics3Processor and SmolVLMProcessor, with their image processors for PIL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import (
    ImageFamily,
    PreparedImage,
    Tiles,
    check_values,
    resample_of,
)
from penstock.gateway.models.language.images.tiling import tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_IMAGE, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_LANCZOS = 1
_LARGEST = 4096
"""No picture is made larger, whatever the model's settings say."""


@dataclass(frozen=True)
class Idefics3Images(ImageFamily):
    architectures = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
    marker = token = _IMAGE

    longest: int
    """The longer side becomes so many pixels."""
    resample: int
    """Pillow's number of a filter."""
    splits: bool
    """There are tiles of the picture beside one of all of it."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> Idefics3Images:
        vision = settings["vision_config"]
        side, cell = int(vision["image_size"]), int(vision["patch_size"]) * int(settings.get("scale_factor", 2))
        check_values(processor)
        longest = int(processor["size"]["longest_edge"])
        if int(processor["max_image_size"]["longest_edge"]) != side or longest < 1 or side % cell:
            raise ValueError("the sizes of images and of the encoder differ")
        splits = bool(processor.get("do_image_splitting", True))
        return cls(cell, side, longest, resample_of(processor, _LANCZOS), splits)

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        filter_ = Image.Resampling(self.resample)
        width, height = _enlarged(*picture.size, self.longest)
        picture = picture.resize((width, height), filter_)
        whole = (self.side, self.side)
        if not self.splits:
            return Tiles([picture.resize(whole, filter_)])
        width, height = _in_tiles(width, height, self.side)
        picture = picture.resize((width, height), filter_)
        if width <= self.side and height <= self.side:
            return Tiles([picture])
        rows, columns = height // self.side, width // self.side
        return Tiles([*tiles_of(picture, self.side), picture.resize(whole, filter_)], rows, columns)

    def text(self, image: PreparedImage) -> str:
        tile = _IMAGE * self.tokens(image.tiles[0])
        lines = [
            "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, image.columns + 1)) + "\n"
            for row in range(1, image.rows + 1)
        ]
        return "".join(lines) + ("\n" if image.rows else "") + f"{_AROUND}{_WHOLE}{tile}{_AROUND}"

    def coarse(self) -> Idefics3Images:
        return replace(self, splits=False)


def _enlarged(width: int, height: int, longest: int) -> tuple[int, int]:
    """With the longer side of the length that is asked for, and the other even."""
    ratio = width / height
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        width, height = _even(int(longest * ratio)), longest
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LARGEST:
        width, height = _LARGEST, int(_LARGEST / ratio)
    elif height > width and height > _LARGEST:
        width, height = int(_LARGEST * ratio), _LARGEST
    return max(width, 1), max(height, 1)


def _even(number: int) -> int:
    return number + number % 2


def _in_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """The next larger size that tiles fill. The shorter side follows the longer one first."""
    ratio = width / height
    if width >= height:
        width = _filled(width, side)
        height = _filled(int(width / ratio), side)
    else:
        height = _filled(height, side)
        width = _filled(int(height * ratio), side)
    return width, height


def _filled(length: int, side: int) -> int:
    return math.ceil(length / side) * side
