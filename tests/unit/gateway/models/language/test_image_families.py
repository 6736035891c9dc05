"""Images of each family, from pictures to a prompt: pixels and tokens are those of transformers' processors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from penstock.engines.contract.messages import ImageInput
from penstock.gateway.models.language.images.reader import RequestImage, image_reader
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import Tokenizer
from support.image_families import DEVIATION, MEAN, SEEING_FAMILIES

PICTURES = [(100, 60), (33, 90), (20, 20), (3, 41)]
Prepared = tuple[list[int], torch.Tensor]
"""A prompt's tokens, and values from -1 to 1 of all tiles, one after the other."""


def gemma3(folder: Path, settings: dict[str, Any], text: str, pictures: list[Image.Image]) -> Prepared:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
    tokenizer.image_token, tokenizer.image_token_id, tokenizer.boi_token_id = "<image_soft_token>", 259, 260
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=16)
    tensors = processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    return tensors["input_ids"][0].tolist(), tensors["pixel_values"].permute(0, 2, 3, 1).reshape(-1)


def gemma4(folder: Path, settings: dict[str, Any], text: str, pictures: list[Image.Image]) -> Prepared:
    """Its processor of texts needs torchvision."""
    tensors = Gemma4ImageProcessorPil(**settings)(pictures, return_tensors="pt")
    tiles, (first, *rest) = [], text.split("<|image|>")
    values = zip(tensors["pixel_values"], tensors["image_position_ids"], rest, strict=True)
    for patches, places, behind in values:
        columns, rows = (places.max(0).values + 1).tolist()
        pixels = patches[: rows * columns].reshape(rows, columns, 4, 4, 3)
        tiles.append(pixels.permute(0, 2, 1, 3, 4).reshape(-1) * 2 - 1)
        first += "<|image>" + "<|image|>" * (rows * columns // 4) + "<image|>" + behind
    return AutoTokenizer.from_pretrained(folder).encode(first, add_special_tokens=False), torch.cat(tiles)


def pixtral(folder: Path, settings: dict[str, Any], text: str, pictures: list[Image.Image], cell: int = 4) -> Prepared:
    """Its processor of texts needs torchvision."""
    tensors = PixtralImageProcessorPil(**settings | {"patch_size": cell})(pictures, return_tensors="pt")
    tiles, (first, *rest) = [], text.split("[IMG]")
    for tile, (height, width), behind in zip(tensors["pixel_values"], tensors["image_sizes"], rest, strict=True):
        tiles.append((tile[:, :height, :width] * DEVIATION + MEAN).permute(1, 2, 0).reshape(-1) * 2 - 1)
        lines = ["[IMG]" * (width // cell)] * (height // cell)
        first += "[IMG_BREAK]".join(lines) + "[IMG_END]" + behind
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.encode(first, add_special_tokens=False), torch.cat(tiles)


def internvl(folder: Path, settings: dict[str, Any], text: str, pictures: list[Image.Image]) -> Prepared:
    tensors = GotOcr2ImageProcessorPil(**settings)(pictures, crop_to_patches=True, return_tensors="pt")
    first, *rest = text.split("<IMG_CONTEXT>")
    for count, behind in zip(tensors["num_patches"], rest, strict=True):
        first += "<img>" + "<IMG_CONTEXT>" * 16 * count + "</img>" + behind
    mean, deviation = (torch.tensor(settings[name])[:, None, None] for name in ("image_mean", "image_std"))
    values = (tensors["pixel_values"] * deviation + mean).permute(0, 2, 3, 1).reshape(-1) * 2 - 1
    return AutoTokenizer.from_pretrained(folder).encode(first, add_special_tokens=False), values


LAYOUTS = {(100, 60): (3, 2, 40, 24), (33, 90): (1, 3, 16, 48), (20, 20): (1, 1, 16, 16), (3, 41): (1, 1, 8, 40)}
"""By a picture's size: columns and rows of tiles, width and height of the whole picture."""


def lfm2(folder: Path, settings: dict[str, Any], text: str, pictures: list[Image.Image]) -> Prepared:
    """Its image processor needs torchvision: what that makes of these sizes is written down, and torch resizes tiles as
    it does there."""
    tiles: list[torch.Tensor] = []
    first, *rest = text.split("<image>")
    special = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    names = SimpleNamespace(**special, image_thumbnail_token="<|img_thumbnail|>")
    for picture, behind in zip(pictures, rest, strict=True):
        columns, rows, width, height = LAYOUTS[picture.size]
        if columns * rows > 1:
            whole = resized(picture, 32 * columns, 32 * rows)
            tiles += [tile for line in whole.split(32) for tile in line.split(32, 1)]
        tiles.append(resized(picture, width, height))
        first += (
            Lfm2VlProcessor._build_image_tokens(names, rows, columns, 16, width * height // 64, True, True) + behind
        )
    tokens = AutoTokenizer.from_pretrained(folder).encode(first, add_special_tokens=False)
    return tokens, torch.cat([tile.reshape(-1) for tile in tiles]) / 255 * 2 - 1


def resized(picture: Image.Image, width: int, height: int) -> torch.Tensor:
    """[height, width, 3]"""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
    return pixels[0].permute(1, 2, 0)


PROCESSORS: dict[str, tuple[Callable[..., Prepared], str]] = {
    "gemma3": (gemma3, "<start_of_image>"),
    "gemma4": (gemma4, "<|image|>"),
    "internvl": (internvl, "<IMG_CONTEXT>"),
    "lfm2-vl": (lfm2, "<image>"),
    "pixtral": (pixtral, "[IMG]"),
    "mistral3": (partial(pixtral, cell=8), "[IMG]"),
}


def picture(size: tuple[int, int]) -> Image.Image:
    values = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


def request_image(picture: Image.Image) -> RequestImage:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return RequestImage(base64.b64encode(buffer.getvalue()).decode(), "messages")


async def placed(folder: Path, text: str, pictures: list[Image.Image]) -> tuple[list[int], tuple[ImageInput, ...]]:
    tokenizer = Tokenizer(folder)
    reader = image_reader(folder, tokenizer)
    assert reader is not None
    images = [request_image(picture) for picture in pictures]
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return await reader.placed(prompt, images, 100_000, WorkPool("images", 1 << 30))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", list(PROCESSORS))
async def test_pixels_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    prepare, marker = PROCESSORS[name]
    family = SEEING_FAMILIES[name]
    family.write_settings(tmp_path)
    pictures = [picture(size) for size in PICTURES]
    text = f"a\n{marker}{marker}\n\nb{marker}c{marker}"
    wanted, values = prepare(tmp_path, family.processor, text, pictures)
    tokens, inputs = await placed(tmp_path, text, pictures)
    assert tokens == wanted
    pixels = np.concatenate([np.frombuffer(image.pixels, np.uint8) for image in inputs])
    np.testing.assert_allclose(pixels / 255 * 2 - 1, values, atol=1e-5 + 2 / 255 * (name == "lfm2-vl"))
    places = [place for image in inputs for start, count in image.spans for place in range(start, start + count)]
    assert places == [place for place, token in enumerate(tokens) if token == 259]


@pytest.mark.parametrize("name", list(PROCESSORS))
def test_a_model_whose_files_make_no_sense_reads_text_only(name: str, tmp_path: Path) -> None:
    family = SEEING_FAMILIES[name]
    config = family.write_settings(tmp_path).to_dict() | {"architectures": [family.model_class.__name__]}
    vision, tokenizer = config["vision_config"], Tokenizer(tmp_path)
    assert image_reader(tmp_path, tokenizer) is not None
    size = "image_size" if name == "gemma3" else "patch_size"
    for broken in ([], vision | {size: 0}, vision | {size: {}}):
        changed = {"vision_config": broken}
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        assert image_reader(tmp_path, tokenizer) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(family.processor | {"image_mean": [0.1] * 3}))
    assert image_reader(tmp_path, tokenizer) is None


@pytest.mark.parametrize("name", ["gemma4-large", "gemma4-unified"])
def test_images_that_attend_to_themselves_fit_the_window(name: str, tmp_path: Path) -> None:
    """The window also bounds what tokens of a picture see of it."""
    family = SEEING_FAMILIES[name]
    config = family.write_settings(tmp_path).to_dict() | {"architectures": [family.model_class.__name__]}
    for window, sees in ((69, False), (70, True)):
        text = config["text_config"] | {"sliding_window": window}
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
        assert (image_reader(tmp_path, Tokenizer(tmp_path)) is not None) == sees
