"""Models that read images: the tokens of transformers, in f32, however the prompt is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.messages import ImageInput
from penstock.engines.core import EngineCore
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.queues import Policy
from support.engine import Driver
from support.images import IMAGE_TOKEN, SIDE, make_seeing_model, reference_tokens_with_images, tiles, with_images, words
from support.models import reference_tokens
from support.qwen_images import make_qwen, picture, reference_tokens_with_pictures, with_pictures

COUNT = 10
Tiles = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("seeing")
    return folder, make_seeing_model(folder)


def answer(driver: Driver, tokens: Sequence[int], images: Sequence[ImageInput], **fields: Any) -> list[int]:
    [request] = driver.add(tokens, COUNT, images=images, **fields)
    driver.run()
    assert driver.ends[request].error is None
    return driver.tokens[request]


def counted(runner: OpenVINORunner) -> list[bytes]:
    """The pixels of all images that it encodes from now on."""
    encoded, encode = [], runner.encode_image

    def encode_image(image: ImageInput, is_over: Callable[[], bool]) -> Any:
        encoded.append(image.pixels)
        return encode(image, is_over)

    runner.encode_image = encode_image  # type: ignore[method-assign]
    return encoded


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, make_runner: Any) -> None:
    model = make_seeing_model(tmp_path, family)
    images = [tiles(1), tiles(2, 3)]
    tokens, inputs = with_images(words(11, 1), *images)
    driver = Driver(make_runner(tmp_path), max_num_seqs=1)
    assert answer(driver, tokens, inputs) == reference_tokens_with_images(model, tokens, images, COUNT)
    text = words(30, 2)
    assert answer(driver, text, ()) == reference_tokens(model, text, COUNT)


def test_chunks_batch_mates_and_samples(seeing: Any, make_runner: Any) -> None:
    """Prompts of pictures in chunks that cut tiles in two, beside a text and each other."""
    folder, model = seeing
    prompts = [with_images(words(9 + n, n), tiles(n, 1 + n)) for n in range(3)]
    text = words(25, 9)
    driver = Driver(make_runner(folder), max_num_seqs=4, max_num_batched_tokens=7)
    requests = [driver.add(tokens, COUNT, images=images)[0] for tokens, images in prompts]
    [other] = driver.add(text, COUNT)
    driver.run()
    for n, request in enumerate(requests):
        assert driver.tokens[request] == reference_tokens_with_images(model, prompts[n][0], [tiles(n, 1 + n)], COUNT)
    assert driver.tokens[other] == reference_tokens(model, text, COUNT)
    samples = driver.add(prompts[0][0], COUNT, n=2, images=prompts[0][1])
    driver.run()
    assert [driver.tokens[i] for i in samples] == [driver.tokens[requests[0]]] * 2


def test_the_same_image_again_is_neither_encoded_nor_computed(seeing: Any, make_runner: Any) -> None:
    folder, model = seeing
    runner = make_runner(folder)
    encoded = counted(runner)
    driver = Driver(runner, max_num_seqs=1)
    image = tiles(4, 12)
    tokens, images = with_images(words(20, 1), image)
    first = answer(driver, tokens, images)
    longer, _ = with_images(words(20, 1), image, after=words(9, 3))
    assert answer(driver, longer, images) == reference_tokens_with_images(model, longer, [image], COUNT)
    assert answer(driver, tokens, images) == first
    assert len(encoded) == 1
    block = runner.info.block_size
    assert driver.cached[3] == driver.cached[2] == len(tokens) // block * block > 20


@pytest.mark.parametrize("before", [0, 30, 40])
def test_two_images_share_no_more_than_what_stands_before_them(before: int, seeing: Any, make_runner: Any) -> None:
    """Their tokens are equal. `before`: words, which may share a block with the image's first token."""
    folder, model = seeing
    driver = Driver(make_runner(folder), max_num_seqs=1)
    for number, image in enumerate((tiles(5, 8), tiles(6, 8)), 1):
        tokens, images = with_images(words(before, 1), image)
        assert answer(driver, tokens, images) == reference_tokens_with_images(model, tokens, [image], COUNT)
        assert driver.cached[number] <= before + 1
    text, _ = with_images(words(before, 1), tiles(5, 8))
    answer(driver, text, ())
    assert driver.cached[3] <= before + 1


def test_the_same_image_in_another_order(seeing: Any, make_runner: Any) -> None:
    folder, model = seeing
    driver = Driver(make_runner(folder), max_num_seqs=1)
    pair = [tiles(7, 4), tiles(8, 4)]
    for images in (pair, pair[::-1], [pair[0], pair[0]]):
        tokens, inputs = with_images(words(3, 1), *images)
        assert answer(driver, tokens, inputs) == reference_tokens_with_images(model, tokens, images, COUNT)


def test_tenants_encode_for_themselves(seeing: Any, make_runner: Any) -> None:
    folder, _ = seeing
    runner = make_runner(folder)
    encoded = counted(runner)
    driver = Driver(runner, max_num_seqs=1)
    tokens, images = with_images(words(3, 1), tiles(1))
    answers = [answer(driver, tokens, images, tenant=tenant) for tenant in ("a", "b", "a")]
    assert len(encoded) == 2
    assert answers[0] == answers[1] == answers[2]


def test_preempted_requests_go_on(seeing: Any, make_runner: Any) -> None:
    """Two that grow into blocks which there are for one."""
    folder, model = seeing
    prompts = [with_images(words(30, n), tiles(n, 5)) for n in range(2)]
    driver = Driver(make_runner(folder, num_blocks=6), max_num_seqs=2, enable_prefix_caching=False)
    requests = [driver.add(tokens, 60, images=images)[0] for tokens, images in prompts]
    driver.run()
    assert driver.core.stats().preemptions > 0
    for n, request in enumerate(requests):
        assert driver.tokens[request] == reference_tokens_with_images(model, prompts[n][0], [tiles(n, 5)], 60)


def test_an_encoder_that_fails_ends_one_request(seeing: Any, make_runner: Any) -> None:
    folder, _ = seeing
    runner = make_runner(folder)
    runner.encode_image = lambda *image: 1 / 0
    driver = Driver(runner, max_num_seqs=2)
    tokens, images = with_images(words(3, 1), tiles(1))
    [broken] = driver.add(tokens, COUNT, images=images)
    [text] = driver.add(words(9, 2), COUNT)
    driver.run()
    error = driver.ends[broken].error
    assert error is not None
    assert error.message == "The engine failed to encode an image."
    assert len(driver.tokens[text]) == COUNT


def test_what_is_kept_is_bounded(seeing: Any, make_runner: Any) -> None:
    folder, _ = seeing
    runner = make_runner(folder)
    encoded = counted(runner)
    driver = Driver(runner, max_num_seqs=1)
    assert isinstance(driver.core, EngineCore)
    assert driver.core.images is not None
    driver.core.images._max_cached_bytes = 2 * 4 * 64 * 4
    for seed in (1, 2, 3, 2, 1):
        answer(driver, *with_images(words(3, 1), tiles(seed)))
    assert [np.frombuffer(pixels, np.uint8)[0] for pixels in encoded] == [tiles(n).flat[0] for n in (1, 2, 3, 1)]


@pytest.mark.parametrize(
    ("spans", "size", "message"),
    [
        (((1, 4),), SIDE, "does not fit"),
        (((1, 3),), SIDE * SIDE * 3, "does not fit"),
        (((30, 4),), SIDE * SIDE * 3, "behind the end"),
        (((4, 2), (1, 2)), SIDE * SIDE * 3, "one after the other"),
    ],
)
def test_images_that_do_not_fit_their_words(spans: Any, size: int, message: str, seeing: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(seeing[0]), max_num_seqs=1)
    [request] = driver.add([IMAGE_TOKEN] * 9, COUNT, images=[ImageInput(b"k", bytes(size), spans, ((SIDE, SIDE),))])
    driver.run()
    error = driver.ends[request].error
    assert error is not None
    assert message in error.message


class Gate:
    """In front of a runner's encoder: images wait behind it, if need be without looking whether they are wanted."""

    def __init__(self, runner: OpenVINORunner) -> None:
        self.arrived = Queue[bytes]()
        """Pixels of what is encoded, as it begins."""
        self.stopped = Queue[bytes]()
        """Of what was not wanted any more."""
        self.may_go_on = threading.Event()
        self.looks = True
        self._encode = runner.encode_image
        runner.encode_image = self.encode_image  # type: ignore[method-assign]

    def encode_image(self, image: ImageInput, is_over: Callable[[], bool]) -> Any:
        self.arrived.put(image.pixels)
        while not self.may_go_on.wait(0.001):
            if self.looks and is_over():
                self.stopped.put(image.pixels)
                return None
        return self._encode(image, is_over)


@pytest.mark.parametrize("looks", [True, False])
def test_an_encoding_that_takes_too_long_is_given_up(looks: bool, seeing: Any, make_runner: Any) -> None:
    """Then the next image is encoded; if the encoder does not stop, that one is given up, too, after some time."""
    folder, model = seeing
    runner = make_runner(folder)
    gate = Gate(runner)
    gate.looks = looks
    driver = Driver(runner, max_num_seqs=2)
    (tokens, images), (behind, others) = (with_images(words(3, seed), tiles(seed)) for seed in (1, 2))
    [late] = driver.add(tokens, COUNT, images=images)
    [next_one] = driver.add(behind, COUNT, images=others)
    driver.step()
    gate.arrived.get(timeout=60)
    driver.now += 1000
    driver.step()
    error = driver.ends[late].error
    assert error is not None
    assert (error.code, error.message) == ("overloaded", "An image was not encoded in time.")
    assert next_one not in driver.ends
    if not looks:
        driver.now += 1000
        driver.step()
        assert driver.ends[next_one].error == error
    gate.may_go_on.set()
    driver.run()
    if looks:
        assert driver.tokens[next_one] == reference_tokens_with_images(model, behind, [tiles(2)], COUNT)
    assert answer(driver, tokens, images) == reference_tokens_with_images(model, tokens, [tiles(1)], COUNT)


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_what_nobody_waits_for_any_more_is_not_encoded(end: str, seeing: Any, make_runner: Any) -> None:
    """The first of three is stopped, since it has begun, the second never begins. The third is for another request,
    too, and goes on for that."""
    folder, model = seeing
    runner = make_runner(folder)
    gate = Gate(runner)
    driver = Driver(runner, max_num_seqs=2)
    tokens, images = with_images(words(3, 1), *map(tiles, (1, 2, 3)))
    [gone] = driver.add(tokens, COUNT, images=images, deadline=1.0 if end == "deadline" else None)
    behind, others = with_images(words(4, 2), tiles(3))
    [other] = driver.add(behind, COUNT, images=others)
    driver.step()
    assert gate.arrived.get(timeout=60) == images[0].pixels
    if end == "abort":
        driver.abort(gone)
    driver.now += 2
    driver.step()
    assert driver.ends[gone].finish_reason == ("abort" if end == "abort" else "error")
    if end == "deadline":  # which is looked at last in a step
        assert driver.core.next_look == driver.now
        driver.step()
    assert gate.stopped.get(timeout=60) == images[0].pixels
    assert gate.arrived.get(timeout=60) == others[0].pixels
    gate.may_go_on.set()
    driver.run()
    assert driver.tokens[other] == reference_tokens_with_images(model, behind, [tiles(3)], COUNT)
    assert gate.arrived.empty()
    assert len(driver.ends) == 2
    assert answer(driver, tokens, images) == reference_tokens_with_images(
        model, tokens, [*map(tiles, (1, 2, 3))], COUNT
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["a0", "b0", "c0", "d0", "a1", "a2", "a3"]),
        ("priority", ["a0", "c0", "b0", "d0", "a1", "a2", "a3"]),
        ("fair", ["a0", "d0", "a1", "a2", "a3", "b0", "c0"]),
    ],
)
def test_requests_take_turns(policy: str, expected: list[str], seeing: Any, make_runner: Any) -> None:
    """One with four images does not hold up others with one. All but d are of one tenant; c is urgent."""
    runner = make_runner(seeing[0])
    gate = Gate(runner)
    driver = Driver(runner, max_num_seqs=8, policy=Policy(policy), ageing_seconds=0.001)
    names: dict[bytes, str] = {}
    for number, (name, count, priority) in enumerate((("a", 4, 0), ("b", 1, 0), ("c", 1, -1), ("d", 1, 0))):
        tokens, images = with_images(words(3, 1), *(tiles(10 * number + n) for n in range(count)))
        names |= {image.pixels: f"{name}{n}" for n, image in enumerate(images)}
        driver.add(tokens, 1, images=images, priority=priority, tenant="two" if name == "d" else "one")
        driver.step()
        driver.now += 0.0001
        if not number:
            begun = [names[gate.arrived.get(timeout=60)]]
    gate.may_go_on.set()
    driver.run()
    assert begun + [names[gate.arrived.get()] for _ in range(6)] == expected


def test_closing_stops_the_encoder(seeing: Any, make_runner: Any) -> None:
    runner = make_runner(seeing[0])
    gate = Gate(runner)
    driver = Driver(runner, max_num_seqs=2)
    tokens, images = with_images(words(3, 1), tiles(1), tiles(2))
    driver.add(tokens, COUNT, images=images)
    driver.step()
    gate.arrived.get(timeout=60)
    assert isinstance(driver.core, EngineCore)
    assert driver.core.images is not None
    driver.core.images.close()
    gate.stopped.get(timeout=60)
    assert gate.arrived.empty()


def test_an_encoding_is_left_where_it_is(tmp_path: Path, make_runner: Any) -> None:
    """The one run of a large picture, which takes several looks. Then the encoder is loaded again, as it was for the
    first image."""
    make_qwen(tmp_path, "qwen2.5-vl")
    runner = make_runner(tmp_path)
    assert runner._images._loaded is None
    assert runner._images.reserved_bytes > 0
    [small], [large] = (with_pictures([], picture(1, side, side))[1] for side in (2, 150))
    rows = runner.encode_image(small)
    looks = iter((False, True))
    assert runner.encode_image(large, lambda: next(looks)) is None
    assert runner._images._loaded is None
    np.testing.assert_array_equal(runner.encode_image(small), rows)


def test_a_draft_model_has_no_guesses_beside_positions_in_a_grid(
    tmp_path: Path, llama_dir: Path, make_runner: Any
) -> None:
    folder = tmp_path / "qwen"
    model = make_qwen(folder, "qwen2.5-vl")
    runner = make_runner(folder, draft_model_dir=llama_dir)
    driver = Driver(runner, max_num_seqs=2, speculative="draft_model")
    tokens, images = with_pictures(words(5, 1), picture(1), after=words(9, 2))
    expected = reference_tokens_with_pictures(model, "qwen2.5-vl", tokens, [picture(1)], COUNT)
    assert answer(driver, tokens, images) == expected
    assert driver.core.stats().draft_tokens == 0
    text = words(9, 3)
    assert answer(driver, text, ()) == reference_tokens(model, text, COUNT)
    assert driver.core.stats().draft_tokens > 0
