"""Families that read images: rows of their encoders and tokens are those of transformers, in f32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.image_encoder import vision_model
from penstock.engines.openvino.runner import OpenVINORunner
from support.engine import Driver
from support.image_families import COUNT, SEEING_FAMILIES, Placed, SeeingFamily, words

Seeing = tuple[SeeingFamily, Any, OpenVINORunner]


@pytest.fixture(params=list(SEEING_FAMILIES))
def seeing(request: pytest.FixtureRequest, tmp_path: Any, make_runner: Any) -> Seeing:
    """The family, transformers' model, and a runner of the same files."""
    family = SEEING_FAMILIES[request.param]
    return family, family.make(tmp_path), make_runner(tmp_path)


def answer(driver: Driver, placed: Placed, **fields: Any) -> list[int]:
    [request] = driver.add(placed.tokens, COUNT, images=placed.inputs, **fields)
    driver.run()
    assert driver.ends[request].error is None
    return driver.tokens[request]


@pytest.mark.families("gemma3", "gemma4", "pixtral", "lfm2-vl")
def test_rows_and_tokens_are_those_of_transformers(seeing: Seeing) -> None:
    """In steps that are shorter than images, beside a text and each other, and with blocks of the prefix cache that end
    inside of one."""
    family, model, runner = seeing
    tiles = family.tiles(1, 2)
    with torch.inference_mode():
        rows = model.get_image_features(**family.inputs(tiles), return_dict=True).pooler_output
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in rows]).numpy()
    ours = runner.encode_image(family.placed([], tiles).inputs[0])
    np.testing.assert_allclose(ours, rows, atol=1e-5 * np.abs(rows).max())
    prompts = [family.placed(words(9 + n, n), family.tiles(n, 1 + n), family.tiles(n + 7)) for n in range(3)]
    text = family.placed(words(25, 9))
    driver = Driver(runner, max_num_seqs=4, max_num_batched_tokens=7)
    requests = [driver.add(one.tokens, COUNT, images=one.inputs)[0] for one in [*prompts, text]]
    driver.run()
    for request, placed in zip(requests, [*prompts, text], strict=True):
        assert driver.tokens[request] == family.reference(model, placed)
    for after in (words(9, 3), words(1, 4)):
        again = family.placed(words(11, 2), *[family.tiles(2, 3), family.tiles(9)], after=after)
        assert answer(driver, again) == family.reference(model, again)
        assert driver.cached[max(driver.cached)] >= runner.info.block_size


@pytest.mark.parametrize("name", list(SEEING_FAMILIES))
def test_encoders_that_make_no_sense_are_refused_by_name(name: str, tmp_path: Path) -> None:
    family = SEEING_FAMILIES[name]
    config = family.write_settings(tmp_path).to_dict() | {"architectures": [family.model_class.__name__]}
    vision, text = config["vision_config"], config["text_config"]
    assert vision_model(config) is not None
    broken: list[dict[str, Any]] = [{"vision_config": [1]}, {"text_config": text | {"hidden_size": "64"}}]
    keys = {"hidden_size", "patch_size", "hidden_act", "hidden_activation", "mm_embed_dim"} & vision.keys()
    broken += [{"vision_config": vision | {key: {}}} for key in keys]
    for changed in broken:
        with pytest.raises(UnsupportedError, match=r"^config\.json has "):
            vision_model(config | changed)


@pytest.mark.parametrize("sides", [(2, 12), (4, 8)])
def test_steps_have_room_for_a_picture_as_large_as_the_window(
    sides: tuple[int, int], tmp_path: Path, make_runner: Any
) -> None:
    """24 tokens are one step, although it may have 7; 32 do not fit and are refused."""
    family = SEEING_FAMILIES["gemma4-large"]
    model = family.make(tmp_path)
    driver = Driver(make_runner(tmp_path), max_num_seqs=2, max_num_batched_tokens=7)
    tile = np.random.default_rng(1).integers(0, 256, (sides[0] * 8, sides[1] * 8, 3), np.uint8)
    placed = family.placed(words(9, 1), [tile])
    [request] = driver.add(placed.tokens, COUNT, images=placed.inputs)
    driver.run()
    error = driver.ends[request].error
    if sides[0] * sides[1] > 24:
        assert "more tokens than a step" in str(error)
    else:
        assert driver.tokens[request] == family.reference(model, placed)
