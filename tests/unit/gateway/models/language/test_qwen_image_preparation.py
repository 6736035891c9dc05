"""Images of Qwen's models: the pixels of transformers' processor, and the tokens that they take."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.gateway.models.language.images.decoder import prepared
from penstock.gateway.models.language.images.family import RefusedImageError
from penstock.gateway.models.language.images.qwen import Qwen3Images, QwenImages
from support.qwen_images import CELL, PATCH, processor, processor_settings

SETTINGS = {"vision_config": {"patch_size": PATCH}}
FAMILIES = {"qwen2.5-vl": QwenImages, "qwen3-vl": Qwen3Images}


def file(width: int, height: int) -> bytes:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_pixels_are_those_of_transformers(name: str) -> None:
    """Also of pictures that are too small, too large, or thin."""
    family, theirs = FAMILIES[name].of(SETTINGS, processor_settings(name)), processor(name)
    for width, height in ((40, 24), (37, 61), (1, 1), (3, 90), (200, 1), (300, 200), (12, 20), (65, 33)):
        content = file(width, height)
        wanted = theirs(Image.open(io.BytesIO(content)), return_tensors="np")
        image = prepared(content, family)
        [(high, wide)] = image.tiles
        _, rows, columns = wanted["image_grid_thw"][0]
        assert (high, wide) == (rows * PATCH, columns * PATCH)
        assert family.text(image) == "<|image_pad|>" * (rows * columns // 4)
        mean, deviation = np.array(theirs.image_mean), np.array(theirs.image_std)
        values = (np.frombuffer(image.pixels, np.uint8).reshape(high, wide, 3) / 255 - mean) / deviation
        patches = values.reshape(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        both_frames = wanted["pixel_values"].reshape(-1, 3, 2, PATCH, PATCH)
        np.testing.assert_allclose(patches.reshape(-1, 3, PATCH, PATCH), both_frames[:, :, 0], atol=1e-5)
        np.testing.assert_array_equal(both_frames[:, :, 0], both_frames[:, :, 1])


def test_a_picture_that_is_too_thin_is_refused() -> None:
    family = QwenImages.of(SETTINGS, processor_settings("qwen2.5-vl"))
    with pytest.raises(RefusedImageError, match="more than 200 times as long"):
        prepared(file(201, 1), family)


def test_little_detail_is_few_tokens() -> None:
    family = QwenImages.of({}, {"min_pixels": 3136, "max_pixels": 12845056})
    content = file(1200, 900)
    fine, coarse = (prepared(content, one).tiles[0] for one in (family, family.coarse()))
    assert fine == (896, 1204)
    assert coarse == (420, 588)
    small = QwenImages.of(SETTINGS, processor_settings("qwen2.5-vl"))
    assert small.coarse() == small


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch_size": 14}, "sizes of images and of the encoder differ"),
        ({"size": {"shortest_edge": 99999, "longest_edge": 9999}}, "sizes of images"),
        ({"image_mean": [0.5] * 3}, "image_mean"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 9}, "resample"),
    ],
)
def test_settings_of_another_kind(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        QwenImages.of(SETTINGS, processor_settings("qwen2.5-vl") | changes)


def test_settings_of_older_checkpoints() -> None:
    settings = {"min_pixels": 4 * CELL**2, "max_pixels": 40 * CELL**2, "patch_size": PATCH, "merge_size": 2}
    assert QwenImages.of(SETTINGS, settings) == QwenImages.of(SETTINGS, processor_settings("qwen2.5-vl"))
