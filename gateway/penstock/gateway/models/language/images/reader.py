"""The reader of a model's images: prepared as its family does it, and put into their places in a prompt."""

from __future__ import annotations

import hashlib
import logging
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engines.contract.messages import ImageInput
from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import ContextLengthError, EngineError, InvalidRequestError
from penstock.engines.formats.model_files import read_json_if_any
from penstock.gateway.models.language.images.families import family_of
from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage
from penstock.gateway.models.language.images.processes import PROCESSES
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import Tokenizer

logger = logging.getLogger("penstock")

MOST_IMAGES = 64
_LONGEST_RUN = 32
"""No tokenizer has a token of so many newlines."""
MOST_BYTES = 20 << 20
"""Of an image's file."""
_MOST_PIXEL_BYTES = 256 << 20
"""Of all tiles of a request."""
_MOST_KEPT_BYTES = 64 << 20
"""Of prepared pixels, for each model: six photographs of 13 tiles."""


class _Known(NamedTuple):
    """What was made of an image."""

    prepared: PreparedImage
    key: bytes
    """`ImageInput.key`."""


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
    known: dict[ImageFamily, _Known] = field(default_factory=dict, repr=False)

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


class PreparedImages:
    """Keeps what was made of the images used last, so that the same one again is not decoded, resized and hashed.
    Called from threads."""

    def __init__(self, max_bytes: int = _MOST_KEPT_BYTES) -> None:
        """`max_bytes`: of pixels."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Place, _Known] = OrderedDict()
        """The one used last is at the end."""
        self.num_bytes = 0

    def prepare(self, image: RequestImage, how: ImageFamily, salt: str) -> _Known:
        """Raises InvalidRequestError."""
        file = image.file()
        place = salt, how, hashlib.blake2b(file, digest_size=32).digest()
        with self._lock:
            known = self._kept.get(place)
            if known is not None:
                self._kept.move_to_end(place)
                return known
        prepared = PROCESSES.prepare(file, how, image.where)
        digest = hashlib.blake2b(repr(prepared.tiles).encode(), digest_size=32)
        digest.update(prepared.pixels)
        known = _Known(prepared, digest.digest())
        self._keep(place, known)
        return known

    def _keep(self, place: _Place, known: _Known) -> None:
        size = len(known.prepared.pixels)
        with self._lock:
            if place in self._kept or size > self._max_bytes:  # another request may have brought the same image
                return
            self._kept[place] = known
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self.num_bytes -= len(oldest.prepared.pixels)


_Place = tuple[str, ImageFamily, bytes]
"""A tenant's salt, as encoded images have it too (no tenant learns by the time it takes what others have shown), how
the image is prepared, and the hash of its file."""


class ImageReader:
    """Of one model."""

    def __init__(self, family: ImageFamily, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a tokenizer that does not have the family's tokens."""
        self.grid = ImageGrid(family.cell, family.side)
        self._family = family
        self._tokenizer = tokenizer
        self._marker, self._token = (_token(tokenizer, name) for name in (family.marker, family.token))
        self._images = PreparedImages()
        self._places = lru_cache(64)(self._new_places)
        runs = {count: self._encoded_newlines(count) for count in range(1, _LONGEST_RUN if family.newlines else 1)}
        self._newlines = {run[0]: count for count, run in runs.items() if len(run) == 1}
        """How many a token has that has nothing else, where they are joined with those of the family."""

    async def placed(
        self, prompt: list[int], images: Sequence[RequestImage], context_length: int, pool: WorkPool, salt: str = ""
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The prompt with the places of its images, and what the engine needs of these. `salt`: `AddRequest.cache_salt`
        of the request. Raises InvalidRequestError, ContextLengthError, OverloadedError."""
        self._check(prompt, images, context_length)
        left = _MOST_PIXEL_BYTES
        prepared: list[_Known] = []
        for image in images:
            how = self._family.coarse() if image.coarse else self._family
            prepared.append(await pool.run(len(image.data), self._prepare, image, how, salt))
            left -= len(prepared[-1].prepared.pixels)
            if left < 0:
                raise InvalidRequestError("The images of this request are too many, or too large.", param="messages")
        return self._joined(prompt, prepared)

    def _check(self, prompt: list[int], images: Sequence[RequestImage], context_length: int) -> None:
        if len(images) > MOST_IMAGES:
            raise too_many(len(images))
        if prompt.count(self._marker) != len(images):
            message = "The model's chat template, or a prompt without one, must have a place for each image."
            raise InvalidRequestError(message, param="messages")
        if len(prompt) + len(images) * self._family.fewest_tokens > context_length:
            message = f"This model's maximum context length is {context_length} tokens; the images do not fit into it."
            raise ContextLengthError(message, param="messages")

    def _prepare(self, image: RequestImage, how: ImageFamily, salt: str) -> _Known:
        """In a thread: hashing many megabytes takes long, too."""
        known = image.known.get(how)
        if known is None:
            known = image.known[how] = self._images.prepare(image, how, salt)
        return known

    def _joined(self, prompt: list[int], prepared: Sequence[_Known]) -> tuple[list[int], tuple[ImageInput, ...]]:
        tokens: list[int] = []
        inputs: list[ImageInput] = []
        left, newlines = iter(prepared), 0
        for token in prompt:
            if token in self._newlines:
                newlines += self._newlines[token]
                continue
            is_image = token == self._marker
            tokens += self._encoded_newlines(newlines + is_image * self._family.newlines)
            newlines = is_image * self._family.newlines
            if not is_image:
                tokens.append(token)
                continue
            image, key = next(left)
            places, spans = self._places(image._replace(pixels=b""))
            begin = len(tokens)
            placed = tuple((begin + start, count) for start, count in spans)
            inputs.append(ImageInput(key, image.pixels, placed, image.tiles))
            tokens += places
        return tokens + self._encoded_newlines(newlines), tuple(inputs)

    def _encoded_newlines(self, count: int) -> list[int]:
        return self._tokenizer.encode("\n" * count, add_special_tokens=False) if count else []

    def _new_places(self, image: PreparedImage) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an image without its pixels, and (start, count) of those that its tiles take."""
        tokens = self._tokenizer.encode(self._family.text(image), add_special_tokens=False)
        spans, start = [], 0
        for is_image, run in groupby(tokens, key=self._token.__eq__):
            count = len(list(run))
            if is_image:
                spans.append((start, count))
            start += count
        return tokens, spans


def image_reader(folder: Path, tokenizer: Tokenizer) -> ImageReader | None:
    """Of the model in a folder. None: it reads text only, or its images cannot be prepared here, which is logged."""
    settings = _settings(folder, "config.json")
    family = family_of(settings.get("architectures"))
    if family is None:
        return None
    obstacle = "Pillow is not installed (pip install 'penstock-server[images]')"
    if find_spec("PIL") is not None:
        try:
            return _reader(folder, family, settings, tokenizer)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            obstacle = f"its files do not say how as they should: {error}"
    logger.warning("%s could read images, and reads text only: %s", folder.name, obstacle)
    return None


def _settings(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        return read_json_if_any(folder / name)
    except EngineError:
        return {}


def _reader(folder: Path, family: type[ImageFamily], settings: Mapping[str, Any], tokenizer: Tokenizer) -> ImageReader:
    """Raises KeyError, TypeError, ValueError for settings of another kind than the published ones."""
    processor = _settings(folder, "preprocessor_config.json")
    processor = processor or _settings(folder, "processor_config.json").get("image_processor", {})
    return ImageReader(family.of(settings, processor), tokenizer)


def _token(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.added_texts.get(name)
    if token is None:
        raise ValueError(f"the tokenizer has no {name}")
    return token
