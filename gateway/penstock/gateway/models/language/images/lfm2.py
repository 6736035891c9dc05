"""Images of LFM2-VL: one tile of a small picture, of any size; square tiles of a large one, and one of all of it.

Source of the rules: `transformers`' Lfm2VlProcessor. Its image processor resizes with torchvision; Pillow's filter of
the same name stands for that here, and pixels differ by no more than one step of 255.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage, Tiles, check_values, resample_of
from penstock.gateway.models.language.images.tiling import cut, grids, nearest_grid

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_TOKEN, _BEGIN, _END, _WHOLE = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
_BILINEAR = 2
_MOST_TILES = 64


@dataclass(frozen=True)
class Lfm2Images(ImageFamily):
    architectures = ("Lfm2VlForConditionalGeneration",)
    marker = token = _TOKEN

    patch: int
    """Pixels of the side of what the encoder reads at a time."""
    tile: int
    """Pixels of the side of a square tile."""
    fewest: int
    most: int
    """Tokens of a tile of the whole picture."""
    fewest_tiles: int
    most_tiles: int
    has_whole: bool
    """There is a tile of the whole picture behind the others."""
    tolerance: float
    """A picture is large that has so many times the pixels of a tile with most tokens."""
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> Lfm2Images:
        check_values(processor)
        cell = int(settings["vision_config"]["patch_size"]) * int(settings.get("downsample_factor", 2))
        factor, splits = int(processor.get("downsample_factor", 2)), processor.get("do_image_splitting", True)
        family = cls(
            cell,
            0,
            patch=int(processor.get("encoder_patch_size", 16)),
            tile=int(processor.get("tile_size", 512)),
            fewest=int(processor.get("min_image_tokens", 64)),
            most=int(processor.get("max_image_tokens", 256)),
            fewest_tiles=int(processor.get("min_tiles", 2)) if splits else 1,
            most_tiles=int(processor.get("max_tiles", 10)) if splits else 1,
            has_whole=bool(processor.get("use_thumbnail", True)),
            tolerance=float(processor.get("max_pixels_tolerance", 2.0)),
            resample=resample_of(processor, _BILINEAR),
        )
        if family.patch * factor != cell or family.tile % cell:
            raise ValueError("the sizes of tiles and of the encoder differ")
        if not 1 <= family.fewest_tiles <= family.most_tiles <= _MOST_TILES:
            raise ValueError(f"tiles from {family.fewest_tiles} to {family.most_tiles}")
        if not 1 <= family.fewest <= family.most <= 1 << 14:
            raise ValueError(f"tokens from {family.fewest} to {family.most}")
        return family

    def prepared(self, picture: Picture) -> Tiles:
        from PIL import Image

        filter_ = Image.Resampling(self.resample)
        whole = picture.resize(self._whole(*picture.size), filter_)
        if not self._is_large(*picture.size) or self.most_tiles == 1:
            return Tiles([whole])
        pairs = grids(self.fewest_tiles, self.most_tiles)
        columns, rows = nearest_grid(*picture.size, pairs, self.tile)
        tiles = cut(picture, columns, rows, self.tile, filter_)
        if self.has_whole and len(tiles) > 1:
            tiles.append(whole)
        return Tiles(tiles, rows, columns)

    def _is_large(self, width: int, height: int) -> bool:
        pixels = math.prod(max(self.patch, round(length / self.cell) * self.cell) for length in (width, height))
        return pixels > self.most * self.cell**2 * self.tolerance

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in whole cells, as many as may be."""
        cell, pixels = self.cell, width * height
        sides = [max(cell, round(length / cell) * cell) for length in (width, height)]
        if math.prod(sides) > self.most * cell**2:
            shrunk = math.sqrt(pixels / (self.most * cell**2))
            sides = [max(cell, math.floor(length / shrunk / cell) * cell) for length in (width, height)]
        elif math.prod(sides) < self.fewest * cell**2:
            grown = math.sqrt(self.fewest * cell**2 / pixels)
            sides = [math.ceil(length * grown / cell) * cell for length in (width, height)]
        return sides[0], sides[1]

    def text(self, image: PreparedImage) -> str:
        tiles = [_TOKEN * self.tokens(tile) for tile in image.tiles]
        if len(tiles) > 1:
            places = product(range(1, image.rows + 1), range(1, image.columns + 1))
            names = [*(f"<|img_row_{row}_col_{column}|>" for row, column in places), _WHOLE][: len(tiles)]
            tiles = [name + tile for name, tile in zip(names, tiles, strict=True)]
        return _BEGIN + "".join(tiles) + _END

    def coarse(self) -> Lfm2Images:
        return replace(self, fewest_tiles=1, most_tiles=1)
