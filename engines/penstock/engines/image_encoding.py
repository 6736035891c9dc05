"""Images of requests: encoded on a thread while the engine steps, and kept for the next request with the same one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from penstock.engines.contract.messages import AddRequest, CallReply, ImageInput
from penstock.engines.contract.runner import ImageHost, ModelRunner
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import EngineError, OverloadedError, PenstockError, QueueFullError
from penstock.engines.inbox import Inbox
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import ImageEncoding

logger = logging.getLogger(__name__)

_SECONDS_OF_TILE, _TILE_BYTES = 10.0, 3 * 512 * 512
"""Most, for each tile in line of so many bytes. Two cores need about two seconds for one in f32."""
_MAX_PENDING_BYTES = 256 << 20
"""Of the pixels of all images that wait to be encoded, unless they are those of one request: many seconds of work."""
_MAX_CACHED_BYTES = 128 << 20
"""Of all rows that are kept: some dozens of large images."""

_Key = tuple[str, bytes]
"""A tenant's salt and the image's key: no tenant learns by the time it takes what others have shown."""


def image_encodings(runner: ModelRunner, intake: QueueIntake, clock: Callable[[], float]) -> ImageEncodings | None:
    """None: the model reads text only."""
    if runner.info.image_grid is None or not isinstance(runner, ImageHost):
        return None
    return ImageEncodings(runner, intake, clock)


class ImageEncodings:
    """Owned by the engine's loop, which calls `needs_of` for each request with images and `advance` between steps."""

    def __init__(
        self,
        host: ImageHost,
        intake: QueueIntake,
        clock: Callable[[], float],
        max_cached_bytes: int = _MAX_CACHED_BYTES,
    ) -> None:
        self._host = host
        self._intake = intake
        self._clock = clock
        self._max_cached_bytes = max_cached_bytes
        self._cache: OrderedDict[_Key, ImageEncoding] = OrderedDict()
        """The one used last is at the end."""
        self._cached_bytes = 0
        self._pending: dict[_Key, ImageEncoding] = {}
        """The oldest first."""
        self.under_way: set[ImageEncoding] = set()
        """Those that the thread has, or will have: also what was given up meanwhile."""
        self._pending_bytes = 0
        """Of all that are under way."""
        self._thread: ThreadPoolExecutor | None = None
        self._inbox: Inbox[_Done] = Inbox()

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        return (self._inbox.wakeup,)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        return min((one.give_up_at for one in self._pending.values()), default=None)

    def needs_of(self, message: AddRequest) -> Sequence[ImageEncoding]:
        """The encodings that the request waits for, in the order of its images. They begin now if there are none; the
        only one has an error if too much is waited for."""
        images = {(message.cache_salt, image.key): image for image in message.images}
        new = {key: image for key, image in images.items() if key not in self._cache and key not in self._pending}
        size = sum(len(image.pixels) for image in new.values())
        if self._pending_bytes and self._pending_bytes + size > _MAX_PENDING_BYTES:
            text = f"Too many images wait to be encoded: {len(self.under_way)}. Try again later."
            return (ImageEncoding(0.0, error=QueueFullError(text, retry_after=1.0)),)
        for key, image in new.items():
            self._begin(key, image)
        return [self._known((message.cache_salt, image.key)) for image in message.images]

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is encoded, and gives up what takes too long."""
        for done in self._inbox.take():
            self.under_way.discard(done.encoding)
            self._pending_bytes -= done.num_bytes
            if done.encoding.is_pending:
                self._end(done.key, done.encoding, done.result)
        now = self._clock() if self._pending else 0.0
        for key, encoding in [one for one in self._pending.items() if one[1].give_up_at <= now]:
            self._end(key, encoding, OverloadedError("An image was not encoded in time."))
        return ()

    def close(self) -> None:
        """What has not begun is given up. Returns when the thread no longer uses the encoder."""
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
        self._pending_bytes += len(image.pixels)
        tiles_in_line = -(-self._pending_bytes // _TILE_BYTES)
        encoding = ImageEncoding(self._clock() + _SECONDS_OF_TILE * tiles_in_line)
        self._pending[key] = encoding
        self.under_way.add(encoding)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "images")
        self._thread.submit(self._work, key, encoding, image)

    def _work(self, key: _Key, encoding: ImageEncoding, image: ImageInput) -> None:
        """On the thread."""
        result: ImageRows | Exception | None = None
        if encoding.is_pending:
            try:
                result = self._host.encode_image(image)
            except Exception as error:
                result = error
        self._inbox.put(_Done(key, encoding, len(image.pixels), result))

    def _end(self, key: _Key, encoding: ImageEncoding, result: ImageRows | Exception | None) -> None:
        del self._pending[key]
        if isinstance(result, Exception):
            encoding.error = _as_error(result)
            self._intake.failed(encoding)
        elif result is not None:
            encoding.rows = result
            self._keep(key, encoding, result.nbytes)

    def _keep(self, key: _Key, encoding: ImageEncoding, size: int) -> None:
        self._cache[key] = encoding
        self._cached_bytes += size
        while self._cached_bytes > self._max_cached_bytes:
            _, oldest = self._cache.popitem(last=False)
            assert oldest.rows is not None
            self._cached_bytes -= oldest.rows.nbytes


class _Done(NamedTuple):
    key: _Key
    encoding: ImageEncoding
    num_bytes: int
    """Of the pixels."""
    result: ImageRows | Exception | None
    """None: it was given up before it began."""


def _as_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("an image failed to be encoded", exc_info=error)
    return EngineError("The engine failed to encode an image.")
