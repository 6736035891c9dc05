"""The process that decodes images. It has a bound on its memory, and no secrets: what a file does to it, it does to
nothing else. Imports nothing of the server's but the families' preparations.

Its input is a sequence of orders, each with a file; its output has an answer for each. They end when its input does.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from dataclasses import astuple
from typing import TYPE_CHECKING, BinaryIO

from penstock.gateway.models.language.images.families import FAMILIES
from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage, RefusedImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MOST_PIXELS = 64_000_000
MOST_SIDE = 32_768
ORDER = struct.Struct("<QI")
"""Bytes of the file, and of what stands before it: the family's name and fields in JSON."""
ANSWER = struct.Struct("<BIIIQ")
"""Whether it is an error, rows, columns, number of tiles, and bytes of what follows the tiles' sizes: pixels, or the
error's text."""
SIZE = struct.Struct("<II")
"""Height and width of a tile."""
_MEMORY = 2 << 30
"""Of addresses: the largest picture takes a quarter of it, and twice that while it is converted."""


def prepared(file: bytes, how: ImageFamily) -> PreparedImage:
    """Raises RefusedImageError, and what Pillow raises."""
    tiles = how.prepared(_decoded(file))
    sizes = tuple((picture.height, picture.width) for picture in tiles.pictures)
    return PreparedImage(b"".join(picture.tobytes() for picture in tiles.pictures), sizes, tiles.rows, tiles.columns)


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


def _answer(file: bytes, how: ImageFamily) -> bytes:
    try:
        image = prepared(file, how)
    except RefusedImageError as error:
        return _failed(str(error))
    except MemoryError:
        return _failed("it takes too much memory to decode")
    except Exception:  # Pillow raises whatever a damaged file makes it run into
        return _failed("it is damaged, or not complete")
    sizes = b"".join(SIZE.pack(*tile) for tile in image.tiles)
    return ANSWER.pack(0, image.rows, image.columns, len(image.tiles), len(image.pixels)) + sizes + image.pixels


def _failed(reason: str) -> bytes:
    text = reason.encode()
    return ANSWER.pack(1, 0, 0, 0, len(text)) + text


def order_of(file: bytes, how: ImageFamily) -> bytes:
    """What `serve` reads before the file."""
    family = json.dumps([type(how).__name__, *astuple(how)]).encode()
    return ORDER.pack(len(file), len(family)) + family


def serve(orders: BinaryIO, answers: BinaryIO) -> None:
    families = {family.__name__: family for family in FAMILIES}
    while len(head := orders.read(ORDER.size)) == ORDER.size:
        size, size_of_family = ORDER.unpack(head)
        name, *fields = json.loads(orders.read(size_of_family))
        answers.write(_answer(orders.read(size), families[name](*fields)))
        answers.flush()


def _bound_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _bound_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
