"""Images from untrusted bytes to tiles: as transformers' processors for PIL make them, or refused."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.images.decoder import prepared
from penstock.gateway.models.language.images.family import PreparedImage
from penstock.gateway.models.language.images.idefics3 import Idefics3Images
from penstock.gateway.models.language.images.processes import ImageProcesses

ONE_TILE = Idefics3Images(cell=16, side=16, longest=16, resample=0, splits=False)
RED, GREEN, WHITE = [255, 0, 0], [0, 255, 0], [255, 255, 255]


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tile(content: bytes) -> np.ndarray[Any, Any]:
    """[16, 16, 3]"""
    return np.frombuffer(prepared(content, ONE_TILE).pixels, np.uint8).reshape(16, 16, 3)


@pytest.mark.parametrize("processor", [SmolVLMImageProcessorPil, Idefics3ImageProcessorPil])
@pytest.mark.parametrize("splits", [True, False])
def test_pixels_are_those_of_transformers(processor: Any, splits: bool) -> None:
    theirs = processor(size={"longest_edge": 128}, max_image_size={"longest_edge": 32}, do_image_splitting=splits)
    for width, height in ((100, 60), (60, 100), (33, 33), (1, 40), (500, 3), (128, 128), (32, 32), (31, 97)):
        image = noise(width, height)
        wanted = theirs(image, return_tensors="np", return_row_col_info=True)
        pixels, _, rows, columns = prepared(file(image), Idefics3Images(16, 32, 128, Image.Resampling.LANCZOS, splits))
        assert (rows, columns) == (wanted["rows"][0][0], wanted["cols"][0][0])
        values = np.frombuffer(pixels, np.uint8).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2) / 255 * 2 - 1
        np.testing.assert_allclose(values, wanted["pixel_values"][0], atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (1, 2), (3, 4)])
def test_the_text_in_their_place_is_that_of_transformers(rows: int, columns: int) -> None:
    wanted = get_image_prompt_string(rows, columns, 5, "<fake_token_around_image>", "<image>", "<global-img>")
    image = PreparedImage(b"", ((16, 80),) * (rows * columns + 1), rows, columns)
    assert ONE_TILE.text(image) == wanted


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    content = file(Image.new("RGB", (40, 40), tuple(RED)), kind)
    np.testing.assert_allclose(tile(content)[8, 8], RED, atol=2)


def test_colours_of_all_kinds() -> None:
    cmyk = file(Image.new("RGB", (16, 16), tuple(GREEN)).convert("CMYK"), "JPEG")
    np.testing.assert_allclose(tile(cmyk)[8, 8], GREEN, atol=2)
    gray = Image.fromarray(np.full((16, 16), 0x8000, np.uint16))
    np.testing.assert_allclose(tile(file(gray))[8, 8], [128] * 3, atol=1)
    assert tile(file(Image.new("L", (16, 16), 77)))[8, 8].tolist() == [77] * 3
    assert tile(file(Image.new("1", (16, 16), 1)))[8, 8].tolist() == WHITE
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([*GREEN, *RED])
    assert tile(file(palette))[8, 8].tolist() == RED
    assert tile(file(palette, transparency=1))[8, 8].tolist() == WHITE, "what is transparent is white"
    half = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    assert tile(file(half))[8, 8].tolist() == WHITE


def test_photographs_are_turned_upright() -> None:
    image = Image.new("RGB", (16, 16), tuple(RED))
    image.paste(tuple(GREEN), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    turned = tile(file(image, "PNG", exif=exif))
    assert turned[8, 2].tolist() == RED
    assert turned[8, 13].tolist() == GREEN


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (16, 16), tuple(colour)) for colour in (RED, GREEN)]
    assert tile(file(frames[0], "GIF", save_all=True, append_images=frames[1:]))[8, 8].tolist() == RED


def png_head(width: int, height: int) -> bytes:
    """A PNG that says that it has so many pixels, and has none."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def processes() -> ImageProcesses:
    return ImageProcesses()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no JPEG, PNG, WebP or GIF"),
        (b"<svg/>", "no JPEG, PNG, WebP or GIF"),
        (file(noise(9, 9), "BMP"), "no JPEG, PNG, WebP or GIF"),
        (file(noise(9, 9), "TIFF"), "no JPEG, PNG, WebP or GIF"),
        (file(noise(99, 99))[:400], "damaged, or not complete"),
        (file(noise(99, 99), "JPEG")[:900], "damaged, or not complete"),
        (png_head(100_000, 100_000), "has 100000 x 100000 pixels"),
        (png_head(40_000, 1), "has 40000 x 1 pixels"),
        (png_head(30, 30), "damaged, or not complete"),
    ],
)
def test_what_is_no_image(processes: ImageProcesses, content: bytes, reason: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"^messages: the image cannot be read: it (is|has).*{reason[4:]}"
    ) as e:
        processes.prepare(content, ONE_TILE, "messages")
    assert e.value.param == "messages"
    assert processes.prepare(file(noise(9, 9)), ONE_TILE, "").rows == 0, "the process goes on"


def test_a_picture_that_needs_more_memory_than_there_is(
    processes: ImageProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds whatever the file says of itself."""
    code = (
        "import resource; from penstock.gateway.models.language.images import decoder as d; d._MEMORY = 120 << 20;"
        "d._bound_memory(); import sys; d.serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
    monkeypatch.setattr("penstock.gateway.models.language.images.processes._COMMAND", ("-c", code))
    bomb = file(Image.new("1", (6000, 6000)))
    assert len(bomb) < 100_000
    with pytest.raises(InvalidRequestError, match=r"too much memory|within the bounds"):
        ImageProcesses().prepare(bomb, ONE_TILE, "messages")


def test_a_process_that_ends_is_replaced(processes: ImageProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file(noise(9, 9))
    wanted = processes.prepare(content, ONE_TILE, "")
    processes._idle[-1].kill()
    processes._idle[-1].wait()
    assert processes.prepare(content, ONE_TILE, "") == wanted
    monkeypatch.setattr("penstock.gateway.models.language.images.processes._SECONDS", 0.0)
    with pytest.raises(InvalidRequestError, match="within the bounds of time"):
        processes.prepare(content * 100_000, ONE_TILE, "")
    monkeypatch.undo()
    assert processes.prepare(content, ONE_TILE, "") == wanted
