"""Grids of square tiles whose shape is near that of a picture, as LFM2-VL and InternVL cut them.

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
    """Tiles of the picture, line by line."""
    whole = picture.resize((columns * side, rows * side), resample)
    places = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    return [whole.crop((left, top, left + side, top + side)) for left, top in places]
