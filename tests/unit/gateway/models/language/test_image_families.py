"""Images of each family, from pictures to a prompt: pixels and tokens are those of transformers' processors."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from penstock.engines.contract.messages import ImageInput
from penstock.gateway.models.language.images.reader import RequestImage, image_reader
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import Tokenizer
from support.image_families import SEEING_FAMILIES

PICTURES = [(100, 60), (33, 90), (20, 20)]


def gemma3(folder: Path, settings: Mapping[str, Any]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
    tokenizer.image_token, tokenizer.image_token_id, tokenizer.boi_token_id = "<image_soft_token>", 259, 260
    return Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=16)


def in_order(tensors: Mapping[str, Any]) -> torch.Tensor:
    """Values of all tiles, one after the other."""
    return tensors["pixel_values"].permute(0, 2, 3, 1).reshape(-1)  # type: ignore[no-any-return]


PROCESSORS: dict[str, tuple[Callable[..., Any], str, Callable[..., torch.Tensor]]] = {
    "gemma3": (gemma3, "<start_of_image>", in_order),
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
    make, marker, values = PROCESSORS[name]
    family = SEEING_FAMILIES[name]
    family.write_settings(tmp_path)
    pictures = [picture(size) for size in PICTURES]
    text = f"a\n{marker}{marker}\n\nb{marker}c"
    wanted = make(tmp_path, family.processor)(
        text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False
    )
    tokens, inputs = await placed(tmp_path, text, pictures)
    assert tokens == wanted["input_ids"][0].tolist()
    pixels = np.concatenate([np.frombuffer(image.pixels, np.uint8) for image in inputs])
    np.testing.assert_allclose(pixels / 255 * 2 - 1, values(wanted), atol=1e-5)
    places = [place for image in inputs for start, count in image.spans for place in range(start, start + count)]
    assert places == [place for place, token in enumerate(tokens) if token == 259]
