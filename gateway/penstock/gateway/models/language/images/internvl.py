"""Images of InternVL: square tiles of a picture, and one of all of it where they are several.

Source of the rules: `transformers`' InternVLProcessor, with GOT-OCR 2's image processor for PIL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage, Tiles, check_values, resample_of
from penstock.gateway.models.language.images.tiling import cut, grids, nearest_grid

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_TOKEN, _BEGIN, _END = "<IMG_CONTEXT>", "<img>", "</img>"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BICUBIC = 3
_MOST_TILES = 64


@dataclass(frozen=True)
class InternVLImages(ImageFamily):
    architectures = ("InternVLForConditionalGeneration",)
    marker = token = _TOKEN

    fewest_tiles: int
    most_tiles: int
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> InternVLImages:
        check_values(processor, _MEAN, _DEVIATION)
        vision, size = settings["vision_config"], processor["size"]
        side, patch = (_one(vision.get(key, usual)) for key, usual in (("image_size", 448), ("patch_size", 14)))
        cell = patch * int(1 / settings.get("downsample_ratio", 0.5))
        if (size["height"], size["width"]) != (side, side) or side % cell:
            raise ValueError("the sizes of images and of the encoder differ")
        fewest, most = int(processor.get("min_patches", 1)), int(processor.get("max_patches", 12))
        if not 1 <= fewest <= most <= _MOST_TILES:
            raise ValueError(f"tiles from {fewest} to {most}")
        return cls(cell, side, fewest, most, resample_of(processor, _BICUBIC))

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        filter_, whole = Image.Resampling(self.resample), (self.side, self.side)
        if self.most_tiles == 1:
            return Tiles([picture.resize(whole, filter_)])
        pairs = grids(self.fewest_tiles, self.most_tiles)
        columns, rows = nearest_grid(*picture.size, pairs, self.side)
        tiles = cut(picture, columns, rows, self.side, filter_)
        if len(tiles) > 1:
            tiles.append(picture.resize(whole, filter_))
        return Tiles(tiles, rows, columns)

    def text(self, image: PreparedImage) -> str:
        return _BEGIN + _TOKEN * sum(map(self.tokens, image.tiles)) + _END

    def coarse(self) -> InternVLImages:
        return replace(self, fewest_tiles=1, most_tiles=1)


def _one(length: Any) -> int:
    """Of a length that may be written twice, one. Raises ValueError where they differ."""
    lengths = set(length) if isinstance(length, list) else {length}
    [one] = lengths
    return int(one)
