"""Qwen's models that read images: rows and tokens of transformers, in f32, however the prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.contract.messages import ImageInput
from penstock.engines.contract.step import PlacedTile
from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.request_table import GridPositions
from penstock.engines.openvino.image_encoder import vision_model
from penstock.engines.openvino.rope import parse_rope
from support.engine import Driver
from support.images import IMAGE_TOKEN, words
from support.models import reference_tokens
from support.qwen_images import (
    CELL,
    QWEN_FAMILIES,
    make_qwen,
    picture,
    processor,
    reference_tokens_with_pictures,
    with_pictures,
)

COUNT = 10
ONE, TWO = picture(1), picture(2, 4, 2)


@pytest.fixture(scope="module", params=[name for name in QWEN_FAMILIES if name != "qwen3-vl-moe"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The family, its folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("seeing")
    return request.param, folder, make_qwen(folder, request.param)


def reference_rows(model: Any, family: str, *pictures: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[tokens, width], with what deepstack adds behind."""
    tensors = processor(family)(list(pictures), return_tensors="pt", do_resize=False)
    with torch.inference_mode():
        out = model.model.visual(tensors["pixel_values"], grid_thw=tensors["image_grid_thw"])
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], 1).numpy()  # type: ignore[no-any-return]


@pytest.mark.families("qwen2.5-vl", "qwen3.5")
def test_rows_and_tokens_are_those_of_transformers(seeing: Any, make_runner: Any) -> None:
    """Prompts in chunks that cut pictures in two, beside a text and each other; one of them ends with a picture."""
    family, folder, model = seeing
    runner = make_runner(folder, state_interval=32)
    prompts = [
        ([ONE, TWO], *with_pictures(words(31, 1), ONE, TWO, after=words(20, 2))),
        ([TWO], *with_pictures(words(3, 2), TWO, after=words(17, 3))),
        ([ONE], *with_pictures(words(9, 5), ONE, after=())),
    ]
    rows = np.concatenate([runner.encode_image(image) for image in prompts[0][2]])
    np.testing.assert_allclose(rows, reference_rows(model, family, ONE, TWO), atol=3e-5)
    expected = [
        reference_tokens_with_pictures(model, family, tokens, pictures, COUNT) for pictures, tokens, _ in prompts
    ]
    text = words(25, 9)
    driver = Driver(runner, max_num_seqs=4, max_num_batched_tokens=7)
    requests = [driver.add(tokens, COUNT, images=images)[0] for _, tokens, images in prompts]
    [other] = driver.add(text, COUNT)
    driver.run()
    assert [driver.tokens[request] for request in requests] == expected
    assert driver.tokens[other] == reference_tokens(model, text, COUNT)
    _, tokens, images = prompts[0]
    samples = driver.add(tokens, COUNT, n=2, images=images)
    driver.run()
    assert [driver.tokens[i] for i in samples] == [expected[0]] * 2, "forks have the same positions"
    longer = [*tokens, *words(9, 4)]
    [more] = driver.add(longer, COUNT, images=images)
    driver.run()
    assert driver.cached[more] == driver.cached[samples[0]] == len(tokens) // 32 * 32 == 64
    assert driver.tokens[more] == reference_tokens_with_pictures(model, family, longer, [ONE, TWO], COUNT)


def test_a_mixture_that_reads_images(tmp_path: Path, make_runner: Any) -> None:
    """Its experts are stored as [out, in], or as published: [in, out]."""
    model = make_qwen(tmp_path, "qwen3-vl-moe")
    tokens, images = with_pictures(words(9, 1), ONE)
    expected = reference_tokens_with_pictures(model, "qwen3-vl-moe", tokens, [ONE], COUNT)
    file = tmp_path / "model.safetensors"
    for _ in range(2):
        driver = Driver(make_runner(tmp_path), max_num_seqs=1)
        [request] = driver.add(tokens, COUNT, images=images)
        driver.run()
        assert driver.tokens[request] == expected
        tensors = load_file(file)
        turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
        assert turned
        save_file(tensors | turned, file)


@pytest.mark.families("qwen2.5-vl", "qwen3.5")
def test_preempted_requests_and_guesses(seeing: Any, make_runner: Any) -> None:
    """Two that grow into blocks which there are for one; guesses that are right, but for one. Recurrent layers keep a
    state behind each."""
    family, folder, model = seeing
    pictures = [picture(n, 4, 5) for n in range(2)]
    prompts = [with_pictures(words(30, n), image) for n, image in enumerate(pictures)]
    expected = [
        reference_tokens_with_pictures(model, family, tokens, [image], 50)
        for (tokens, _), image in zip(prompts, pictures, strict=True)
    ]
    runner = make_runner(folder, num_blocks=6)
    for guesses in ([(), ()], [(*tokens[:20], 3, *tokens[20:]) for tokens in expected]):
        driver = Driver(runner, max_num_seqs=2, enable_prefix_caching=False)
        requests = [
            driver.add(tokens, 50, images=images, prediction=guess)[0]
            for (tokens, images), guess in zip(prompts, guesses, strict=True)
        ]
        driver.run()
        assert driver.core.stats().preemptions > 0
        assert [driver.tokens[request] for request in requests] == expected
    assert driver.core.stats().accepted_tokens > 0


@pytest.fixture(scope="module")
def qwen25(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen25")
    return folder, make_qwen(folder, "qwen2.5-vl")


def test_pictures_that_do_not_fit_their_tokens(qwen25: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(qwen25[0]), max_num_seqs=1)
    for spans, tile, message in [
        (((1, 2), (4, 2)), (2 * CELL, 2 * CELL), "tokens must stand one after the other"),
        (((1, 4),), (CELL, 3 * CELL), "does not fit"),
        (((1, 4),), (2 * CELL + 1, 2 * CELL), "does not fit"),
    ]:
        image = ImageInput(b"k", bytes(3 * tile[0] * tile[1]), spans, (tile,))
        [request] = driver.add([IMAGE_TOKEN] * 9, COUNT, images=[image])
        driver.run()
        error = driver.ends[request].error
        assert error is not None
        assert message in error.message


def test_positions_are_those_of_transformers(qwen25: Any) -> None:
    tokens, images = with_pictures(words(5, 1), ONE, TWO, picture(3, 1, 7))
    ids = torch.tensor([tokens])
    tensors = processor("qwen2.5-vl")([ONE, TWO, picture(3, 1, 7)], return_tensors="pt", do_resize=False)
    expected, _ = qwen25[1].model.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), tensors["image_grid_thw"])
    positions = GridPositions([PlacedTile(image.spans[0][0], *image.tiles[0]) for image in images], CELL)
    for first, stop in ((0, len(tokens)), (3, 9), (len(tokens) - 1, len(tokens)), (0, 1)):
        assert positions.between(first, stop).tolist() == expected[:, 0, first:stop].T.tolist()
    assert positions.between(len(tokens), len(tokens) + 1).tolist() == [[int(expected.max()) + 1] * 3]


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ([2, 3, 3], False, (0, 0, 1, 1, 1, 2, 2, 2)),
        ([4, 2, 2], True, (0, 1, 2, 0, 1, 2, 0, 0)),
        ([2, 3, 2], False, ()),
        ([2, 3], True, ()),
        ([-1, 9, 0], False, ()),
        (None, True, ()),
    ],
)
def test_sections_of_positions(sections: Any, interleaved: bool, axes: tuple[int, ...]) -> None:
    config = {"mrope_interleaved": interleaved, "rope_parameters": {"mrope_section": sections, "rope_theta": 1e4}}
    assert parse_rope(config, 16).axes == axes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth=0 for its image encoder"),
        ({"patch_size": "14"}, "patch_size=14 for its image encoder"),
        ({"num_heads": 5}, "heads do not divide evenly"),
        ({"hidden_act": "tanh"}, "hidden_act='tanh'"),
        ({"window_size": 8}, "windows are smaller than a token"),
        ({"fullatt_block_indexes": "7"}, "fullatt_block_indexes=7"),
        ({"temporal_patch_size": 1}, "patches of another kind"),
    ],
)
def test_encoders_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    settings = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 64, "vision_config": changes}
    with pytest.raises(UnsupportedError, match=message):
        vision_model(settings)


def test_sections_that_do_not_fit_leave_a_model_that_reads_text(
    tmp_path: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_qwen(tmp_path, "qwen2.5-vl")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mrope_section"', '"sections"'))
    driver = Driver(make_runner(tmp_path), max_num_seqs=1)
    assert "reads text only: mrope_section in config.json" in caplog.text
    text = words(25, 9)
    [request] = driver.add(text, COUNT)
    driver.run()
    assert driver.tokens[request] == reference_tokens(model, text, COUNT)
