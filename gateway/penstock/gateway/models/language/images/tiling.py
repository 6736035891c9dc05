"""Square tiles of a picture, and the grids of tiles whose shape is near the picture's.

Source of the rules: `transformers`' image processors of LFM2-VL and GOT-OCR 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.Image import Resampling


@lru_cache
def grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) of so many tiles, by their number."""
    sides = range(1, most + 1)
    pairs = [(columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most]
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))


def nearest_grid(width: int, height: int, pairs: Iterable[tuple[int, int]], side: int) -> tuple[int, int]:
    """The (columns, rows) whose ratio is nearest to the picture's. Of those that are equally near, the later one if
    the picture has more than half of its pixels."""
    best, distance = (1, 1), float("inf")
    for columns, rows in pairs:
        difference = abs(width / height - columns / rows)
        if difference < distance or (difference == distance and width * height > 0.5 * side * side * columns * rows):
            best, distance = (columns, rows), difference
    return best


def cut(picture: Picture, columns: int, rows: int, side: int, resample: Resampling) -> list[Picture]:
    """As `tiles_of`, resized so that they are that many."""
    return tiles_of(picture.resize((columns * side, rows * side), resample), side)


def tiles_of(picture: Picture, side: int) -> list[Picture]:
    """Those that fill the picture, line by line."""
    places = [(left, top) for top in range(0, picture.height, side) for left in range(0, picture.width, side)]
    return [picture.crop((left, top, left + side, top + side)) for left, top in places]
