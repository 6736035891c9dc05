"""What the tests of all engines share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.engines.contract.messages import ImageInput
from support.door import AttachedDriver
from support.engine import Driver
from support.images import TOKENS, tiles, with_images


class Oracle(Protocol):
    def __call__(self, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """The first `count` greedy tokens after a prompt. `guess`, what the engine says they are, changes nothing: an
        oracle may be sooner done with what is right in it."""


_attached: list[AttachedDriver] = []


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


class SeeingDriver(Driver):
    """Each prompt that is long enough begins with an image."""

    def add(self, prompt: Sequence[int], max_tokens: int, *args: Any, **fields: Any) -> tuple[int, ...]:
        tokens, _, inputs = with_an_image(prompt)
        return super().add(tokens, max_tokens, *args, images=inputs, **fields)


def with_an_image(
    prompt: Sequence[int],
) -> tuple[Sequence[int], list[np.ndarray[Any, Any]], Sequence[ImageInput]]:
    """The prompt with one of two images in place of its first words but one, as long as before."""
    if len(prompt) < TOKENS + 3:
        return prompt, [], ()
    images = [tiles(prompt[0] % 2)]
    tokens, inputs = with_images(prompt[:1], *images, after=prompt[TOKENS + 2 :])
    return tokens, images, inputs


def driver_of(candidate, **scheduler):
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    candidate.forget()
    if candidate.sees:
        return SeeingDriver(candidate.engine, **defaults | scheduler)
    if not candidate.attached:
        return Driver(candidate.engine, **defaults | scheduler)
    _attached.append(AttachedDriver(candidate.engine, **defaults | scheduler))
    return _attached[-1]


def close_drivers():
    while _attached:
        _attached.pop().core.close()
