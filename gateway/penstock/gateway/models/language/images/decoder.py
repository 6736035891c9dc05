"""The process that decodes images. It has a bound on its memory, and no secrets: what a file does to it, it does to
nothing else. Imports nothing of the server's.

Its input is a sequence of orders, each with a file; its output has an answer for each. They end when its input does.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MOST_PIXELS = 64_000_000
MOST_SIDE = 32_768
ORDER = struct.Struct("<QIIBB")
"""Bytes of the file, then `Preparation`."""
ANSWER = struct.Struct("<BIIQ")
"""Whether it is an error, rows, columns, and bytes of what follows: pixels, or the error's text."""
_MEMORY = 2 << 30
"""Of addresses: the largest picture takes a quarter of it, and twice that while it is converted."""
_LARGEST = 4096
"""No picture is made larger, whatever the model's settings say."""


class Preparation(NamedTuple):
    """What Idefics 3 and SmolVLM are shown of a picture, as `transformers`' processors for PIL make it."""

    longest: int
    """The longer side becomes so many pixels."""
    side: int
    """Of a tile."""
    resample: int
    """Pillow's number of a filter."""
    splits: bool
    """There are tiles of the picture beside one of all of it."""


class RefusedImageError(Exception):
    """For the client: its message says what is wrong with the picture."""


def prepared(file: bytes, how: Preparation) -> tuple[int, int, bytes]:
    """Rows and columns of tiles, 0 where there is only the one of the whole picture, which is the last; and the pixels
    of all, [tiles, side, side, 3] in 8 bits. Raises RefusedImageError, and what Pillow raises."""
    from PIL import Image

    picture = _decoded(file)
    filter_ = Image.Resampling(how.resample)
    width, height = _enlarged(*picture.size, how.longest)
    picture = picture.resize((width, height), filter_)
    whole = (how.side, how.side)
    if not how.splits:
        return 0, 0, picture.resize(whole, filter_).tobytes()
    width, height = _in_tiles(width, height, how.side)
    picture = picture.resize((width, height), filter_)
    if width <= how.side and height <= how.side:
        return 0, 0, picture.tobytes()
    rows, columns = height // how.side, width // how.side
    tiles = [picture.crop(box).tobytes() for box in _boxes(rows, columns, how.side)]
    return rows, columns, b"".join([*tiles, picture.resize(whole, filter_).tobytes()])


def _decoded(file: bytes) -> Picture:
    """Upright, in RGB; what is transparent is white."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound is below, and refuses instead of warning
    try:
        picture: Picture = Image.open(io.BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise RefusedImageError("it is no JPEG, PNG, WebP or GIF") from None
    width, height = picture.size
    if width * height > MOST_PIXELS or max(width, height) > MOST_SIDE:
        raise RefusedImageError(f"it has {width} x {height} pixels; up to {MOST_PIXELS} are decoded")
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits of gray, which Pillow would cut off at 255
        picture = picture.convert("I").point(lambda value: value / 256).convert("L")
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


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


def _boxes(rows: int, columns: int, side: int) -> Iterator[tuple[int, int, int, int]]:
    for row in range(rows):
        for column in range(columns):
            yield column * side, row * side, (column + 1) * side, (row + 1) * side


def _answer(file: bytes, how: Preparation) -> bytes:
    try:
        rows, columns, pixels = prepared(file, how)
    except RefusedImageError as error:
        return _failed(str(error))
    except MemoryError:
        return _failed("it takes too much memory to decode")
    except Exception:  # Pillow raises whatever a damaged file makes it run into
        return _failed("it is damaged, or not complete")
    return ANSWER.pack(0, rows, columns, len(pixels)) + pixels


def _failed(reason: str) -> bytes:
    text = reason.encode()
    return ANSWER.pack(1, 0, 0, len(text)) + text


def serve(orders: BinaryIO, answers: BinaryIO) -> None:
    while len(head := orders.read(ORDER.size)) == ORDER.size:
        size, longest, side, resample, splits = ORDER.unpack(head)
        answers.write(_answer(orders.read(size), Preparation(longest, side, resample, bool(splits))))
        answers.flush()


def _bound_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _bound_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
