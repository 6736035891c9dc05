"""Images of requests: encoded on a thread while the engine steps, and kept for the next request with the same one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from penstock.engines.contract.messages import AddRequest, CallReply, ImageInput
from penstock.engines.contract.runner import ImageHost, ModelRunner
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import EngineError, PenstockError, QueueFullError
from penstock.engines.inbox import Inbox
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import ImageEncoding

logger = logging.getLogger(__name__)

_MAX_PENDING_BYTES = 256 << 20
"""Of the pixels of all images that wait to be encoded, unless they are those of one request: many seconds of work."""
_MAX_CACHED_BYTES = 128 << 20
"""Of all rows that are kept: some dozens of large images."""

_Key = tuple[str, bytes]
"""A tenant's salt and the image's key: no tenant learns by the time it takes what others have shown."""


def image_encodings(runner: ModelRunner, intake: QueueIntake) -> ImageEncodings | None:
    """None: the model reads text only."""
    if not runner.info.supports_images or not isinstance(runner, ImageHost):
        return None
    return ImageEncodings(runner, intake)


class ImageEncodings:
    """Owned by the engine's loop, which calls `needs_of` for each request with images and `advance` between steps."""

    next_look: ClassVar[None] = None

    def __init__(
        self, host: ImageHost, intake: QueueIntake, max_cached_bytes: int = _MAX_CACHED_BYTES
    ) -> None:
        self._host = host
        self._intake = intake
        self._max_cached_bytes = max_cached_bytes
        self._cache: OrderedDict[_Key, ImageEncoding] = OrderedDict()
        """The one used last is at the end."""
        self._cached_bytes = 0
        self._pending: dict[_Key, ImageEncoding] = {}
        self._pending_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._inbox: Inbox[tuple[_Key, int, ImageRows | Exception]] = Inbox()
        """With the number of its pixels' bytes."""

    @property
    def under_way(self) -> Collection[object]:
        return self._pending

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        return (self._inbox.wakeup,)

    def needs_of(self, message: AddRequest) -> Sequence[ImageEncoding]:
        """The encodings that the request waits for, in the order of its images. They begin now if there are none; one
        has an error if too much is waited for."""
        keys = [(message.cache_salt, image.key) for image in message.images]
        new = {
            key: image
            for key, image in zip(keys, message.images, strict=True)
            if key not in self._cache and key not in self._pending
        }
        size = sum(len(image.pixels) for image in new.values())
        if self._pending and self._pending_bytes + size > _MAX_PENDING_BYTES:
            text = f"Too many images wait to be encoded: {len(self._pending)}. Try again later."
            return (ImageEncoding(error=QueueFullError(text, retry_after=1.0)),)
        for key, image in new.items():
            self._begin(key, image)
        return [self._known(key) for key in keys]

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is encoded."""
        for key, size, result in self._inbox.take():
            self._pending_bytes -= size
            encoding = self._pending.pop(key)
            if isinstance(result, Exception):
                encoding.error = _as_error(result)
                self._intake.failed(encoding)
            else:
                encoding.rows = result
                self._keep(key, encoding, result.nbytes)
        return ()

    def close(self) -> None:
        """What is being encoded is given up."""
        self._inbox.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _known(self, key: _Key) -> ImageEncoding:
        cached = self._cache.get(key)
        if cached is None:
            return self._pending[key]
        self._cache.move_to_end(key)
        return cached

    def _begin(self, key: _Key, image: ImageInput) -> None:
        self._pending[key] = ImageEncoding()
        self._pending_bytes += len(image.pixels)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "images")
        self._thread.submit(self._work, key, image.pixels)

    def _work(self, key: _Key, pixels: bytes) -> None:
        """On the thread."""
        try:
            result: ImageRows | Exception = self._host.encode_image(pixels)
        except Exception as error:
            result = error
        self._inbox.put((key, len(pixels), result))

    def _keep(self, key: _Key, encoding: ImageEncoding, size: int) -> None:
        self._cache[key] = encoding
        self._cached_bytes += size
        while self._cached_bytes > self._max_cached_bytes:
            _, oldest = self._cache.popitem(last=False)
            assert oldest.rows is not None
            self._cached_bytes -= oldest.rows.nbytes


def _as_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("an image failed to be encoded", exc_info=error)
    return EngineError("The engine failed to encode an image.")
