"""The reader of a model's images: how its processor prepares them, and what stands for them in a prompt.

Source of the rules: `transformers`' Idefics3Processor and SmolVLMProcessor, with their image processors for PIL.
"""

from __future__ import annotations

import hashlib
import logging
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.engines.contract.messages import ImageInput
from penstock.engines.contract.model_info import ImageTile
from penstock.engines.errors import ContextLengthError, EngineError, InvalidRequestError
from penstock.engines.formats.model_files import read_json_if_any
from penstock.gateway.models.language.images.decoder import Preparation
from penstock.gateway.models.language.images.processes import PROCESSES, PreparedImage
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import Tokenizer

logger = logging.getLogger("penstock")

_ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_IMAGE, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_LANCZOS, _FILTERS = 1, range(6)
MOST_IMAGES = 64
MOST_BYTES = 20 << 20
"""Of an image's file."""
_MOST_PIXEL_BYTES = 256 << 20
"""Of all tiles of a request."""


@dataclass(slots=True, eq=False)
class RequestImage:
    """An image as a client has sent it. A conversation that is too long is rendered several times: what was done for an
    image stays with it."""

    data: str | bytes
    """Base64, or the file itself. Empty as long as the image is at its `url`, or in a file of `/v1/files`."""
    where: str
    """The client's name for it, for errors."""
    coarse: bool = False
    """One tile is enough."""
    url: str = ""
    file_id: str = ""
    prepared: dict[Preparation, tuple[PreparedImage, bytes]] = field(default_factory=dict, repr=False)
    """With `ImageInput.key`."""

    def file(self) -> bytes:
        """Raises InvalidRequestError."""
        if isinstance(self.data, bytes):
            return self.data
        if len(self.data) > MOST_BYTES * 4 // 3 + 4:
            message = f"{self.where}: images of more than {MOST_BYTES >> 20} MiB are not read."
            raise InvalidRequestError(message, param=self.where)
        try:
            return b64decode(self.data, validate=True)
        except ValueError:
            raise InvalidRequestError(f"{self.where}: the image is not in base64.", param=self.where) from None


def image_of_url(url: object, detail: object, where: str) -> RequestImage:
    """Of a data URL in base64, or one of another server. Raises InvalidRequestError."""
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(f"{where}: the image's URL is missing.", param=where)
    if url[:5].lower() != "data:":
        return RequestImage("", where, coarse=detail == "low", url=url)
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequestError(f"{where}: a data: URL of an image must be in base64.", param=where)
    return RequestImage(data, where, coarse=detail == "low")


def too_many(count: int) -> InvalidRequestError:
    return InvalidRequestError(f"A request can have {MOST_IMAGES} images; this one has {count}.", param="messages")


def take_images(messages: Sequence[dict[str, Any]]) -> list[RequestImage]:
    """Those in the parts of messages, in their order. Templates get the parts without them."""
    images: list[RequestImage] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            image = part.pop("image", None)
            if isinstance(image, RequestImage):
                images.append(image)
    return images


class ImageReader:
    """Of one model."""

    def __init__(self, tile: ImageTile, how: Preparation, tokenizer: Tokenizer, token: int) -> None:
        self.tile = tile
        self._how = how
        self._tokenizer = tokenizer
        self._token = token
        self._places = lru_cache(64)(self._new_places)

    async def placed(
        self, prompt: list[int], images: Sequence[RequestImage], context_length: int, pool: WorkPool
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The prompt with the places of its images, and what the engine needs of these. Raises InvalidRequestError,
        ContextLengthError, OverloadedError."""
        self._check(prompt, images, context_length)
        left = _MOST_PIXEL_BYTES
        prepared: list[tuple[PreparedImage, bytes]] = []
        for image in images:
            how = self._how._replace(splits=self._how.splits and not image.coarse)
            prepared.append(await pool.run(len(image.data), self._prepare, image, how))
            left -= len(prepared[-1][0].pixels)
            if left < 0:
                raise InvalidRequestError("The images of this request are too many, or too large.", param="messages")
        return self._joined(prompt, prepared)

    def _check(self, prompt: list[int], images: Sequence[RequestImage], context_length: int) -> None:
        if len(images) > MOST_IMAGES:
            raise too_many(len(images))
        if prompt.count(self._token) != len(images):
            message = "The model's chat template, or a prompt without one, must have a place for each image."
            raise InvalidRequestError(message, param="messages")
        if len(prompt) + len(images) * self.tile.tokens > context_length:
            message = f"This model's maximum context length is {context_length} tokens; the images do not fit into it."
            raise ContextLengthError(message, param="messages")

    def _prepare(self, image: RequestImage, how: Preparation) -> tuple[PreparedImage, bytes]:
        """With `ImageInput.key`. In a thread: hashing many megabytes takes long, too."""
        known = image.prepared.get(how)
        if known is None:
            prepared = PROCESSES.prepare(image.file(), how, image.where)
            known = image.prepared[how] = prepared, hashlib.blake2b(prepared.pixels, digest_size=32).digest()
        return known

    def _joined(
        self, prompt: list[int], prepared: Sequence[tuple[PreparedImage, bytes]]
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        tokens: list[int] = []
        inputs: list[ImageInput] = []
        left = iter(prepared)
        for token in prompt:
            if token != self._token:
                tokens.append(token)
                continue
            image, key = next(left)
            places, spans = self._places(image.rows, image.columns)
            begin = len(tokens)
            inputs.append(ImageInput(key, image.pixels, tuple((begin + start, count) for start, count in spans)))
            tokens += places
        return tokens, tuple(inputs)

    def _new_places(self, rows: int, columns: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an image, and (start, count) of those that its tiles take."""
        text = image_text(rows, columns, self.tile.tokens)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        spans, start = [], 0
        for is_image, run in groupby(tokens, key=self._token.__eq__):
            count = len(list(run))
            if is_image:
                spans.append((start, count))
            start += count
        return tokens, spans


def image_text(rows: int, columns: int, tokens: int) -> str:
    """What stands in a prompt for an image with so many tiles of so many tokens, and one of the whole image."""
    tile = _IMAGE * tokens
    lines = [
        "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    return "".join(lines) + ("\n" if rows else "") + f"{_AROUND}{_WHOLE}{tile}{_AROUND}"


def image_reader(folder: Path, tokenizer: Tokenizer) -> ImageReader | None:
    """Of the model in a folder. None: it reads text only, or its images cannot be prepared here, which is logged."""
    settings = _settings(folder, "config.json")
    names = settings.get("architectures")
    if not isinstance(names, list) or not set(names) & set(_ARCHITECTURES):
        return None
    obstacle = "Pillow is not installed (pip install 'penstock-server[images]')"
    if find_spec("PIL") is not None:
        try:
            return _reader(folder, settings, tokenizer)
        except (KeyError, TypeError, ValueError) as error:
            obstacle = f"its files do not say how as they should: {error}"
    logger.warning("%s could read images, and reads text only: %s", folder.name, obstacle)
    return None


def _settings(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        return read_json_if_any(folder / name)
    except EngineError:
        return {}


def _reader(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> ImageReader:
    """Raises KeyError, TypeError, ValueError for settings of another kind than the published ones."""
    vision = settings["vision_config"]
    side, patch, joined = int(vision["image_size"]), int(vision["patch_size"]), int(settings.get("scale_factor", 2))
    tile = ImageTile(side, (side // patch // joined) ** 2)
    processor = _settings(folder, "preprocessor_config.json")
    processor = processor or _settings(folder, "processor_config.json").get("image_processor", {})
    for key, usual in (("do_resize", True), ("image_mean", [0.5] * 3), ("image_std", [0.5] * 3)):
        if processor.get(key, usual) != usual:
            raise ValueError(f"{key}={str(processor[key])[:50]}")
    longest, resample = int(processor["size"]["longest_edge"]), int(processor.get("resample", _LANCZOS))
    if int(processor["max_image_size"]["longest_edge"]) != side or longest < 1 or resample not in _FILTERS:
        raise ValueError("the sizes of images and of the encoder differ")
    token = tokenizer.added_texts.get(_IMAGE)
    if token is None:
        raise ValueError(f"the tokenizer has no {_IMAGE}")
    splits = bool(processor.get("do_image_splitting", True))
    return ImageReader(tile, Preparation(longest, side, resample, splits), tokenizer, token)
