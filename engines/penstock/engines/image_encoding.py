"""Images of requests: encoded on a thread while the engine steps, and kept for the next request with the same one."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import PriorityQueue
from typing import NamedTuple

from penstock.engines.contract.messages import AddRequest, CallReply, ImageInput
from penstock.engines.contract.runner import ImageHost, ModelRunner
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import EngineError, OverloadedError, PenstockError, QueueFullError
from penstock.engines.inbox import Inbox
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import ImageEncoding
from penstock.engines.scheduler.queues import Policy, aged

logger = logging.getLogger(__name__)

_SECONDS_OF_TILE, _TILE_BYTES = 10.0, 3 * 512 * 512
"""Most that an image may take for each tile of so many bytes. Two cores need about two seconds for one in f32."""
_SECONDS_TO_LOAD = 120.0
"""The same beside its tiles: the first one may have to wait for the encoder itself."""
_USUAL_SECONDS_OF_TILE = 1.0
"""Until one has been measured."""
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
        self._pending: dict[_Key, _Work] = {}
        self.under_way: set[ImageEncoding] = set()
        """Those that the thread has, or will have: also what was given up meanwhile."""
        self._pending_bytes = 0
        """Of all that are under way."""
        self._turns = _Turns(intake.config)
        self._line: PriorityQueue[tuple[_Turn, int, _Work]] = PriorityQueue()
        """What the thread takes next. An image has several places if requests that came later have earlier turns."""
        self._num_placed = 0
        self._begun: _Work | None = None
        """What the thread has. It may be over already."""
        self._thread: ThreadPoolExecutor | None = None
        self._inbox: Inbox[_Begun | _Done] = Inbox()

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        return (self._inbox.wakeup,)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`: at once if nobody waits for an image any more."""
        if any(not self._is_wanted(work) for work in self._pending.values()):
            return self._clock()
        return None if self._begun is None else self._begun.give_up_at

    def needs_of(self, message: AddRequest) -> Sequence[ImageEncoding]:
        """The encodings that the request waits for, in the order of its images. They get in line now if there are none;
        the only one has an error if too much is waited for."""
        images = {(message.cache_salt, image.key): image for image in message.images}
        new = {key: image for key, image in images.items() if key not in self._cache and key not in self._pending}
        size = sum(len(image.pixels) for image in new.values())
        if self._pending_bytes and self._pending_bytes + size > _MAX_PENDING_BYTES:
            text = f"Too many images wait to be encoded: {len(self.under_way)}. Try again later."
            return (ImageEncoding(error=QueueFullError(text, retry_after=1.0)),)
        needed = [self._known(key) or self._begin(key, image) for key, image in images.items()]
        by_key = dict(zip(images, needed, strict=True))
        for key in images:
            if key in self._pending:
                self._place(self._pending[key], message)
        return [by_key[message.cache_salt, image.key] for image in message.images]

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is encoded, and gives up what takes too long or is no longer wanted."""
        for news in self._inbox.take():
            if isinstance(news, _Begun):
                self._begun = news.work
                news.work.give_up_at = news.at + news.work.patience
                continue
            work = news.work
            self._begun = None
            self.under_way.discard(work.encoding)
            self._pending_bytes -= work.num_bytes
            if not work.is_over.is_set():
                self._turns.observe(work.tiles, news.seconds)
                self._end(work, news.result)
        for work in [work for work in self._pending.values() if not self._is_wanted(work)]:
            self._end(work, None)
        begun = self._begun
        if begun is not None and begun.give_up_at <= self._clock():
            self._give_up(begun)
        return ()

    def close(self) -> None:
        """All is given up. Returns when the thread no longer uses the encoder."""
        for work in self._pending.values():
            work.is_over.set()
        self._inbox.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _is_wanted(self, work: _Work) -> bool:
        """Whether a request waits for it that has not ended."""
        return not work.wanted_by.isdisjoint(self._intake.requests)

    def _known(self, key: _Key) -> ImageEncoding | None:
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached
        return self._pending[key].encoding if key in self._pending else None

    def _begin(self, key: _Key, image: ImageInput) -> ImageEncoding:
        work = self._pending[key] = _Work(key, image, ImageEncoding())
        self._pending_bytes += work.num_bytes
        self.under_way.add(work.encoding)
        return work.encoding

    def _place(self, work: _Work, message: AddRequest) -> None:
        """Puts an image in line where the request has its next turn."""
        work.wanted_by.update(message.ids)
        turn = self._turns.next(message, work.tiles)
        if work.turn is not None and work.turn <= turn:
            return
        work.turn = turn
        self._num_placed += 1
        self._line.put((turn, self._num_placed, work))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "images")
        self._thread.submit(self._encode_next)

    def _encode_next(self) -> None:
        """On the thread, once for each place in line."""
        work = self._line.get_nowait()[2]
        if work.is_taken:
            return
        work.is_taken = True
        if work.is_over.is_set():
            self._inbox.put(_Done(work, None, 0.0))
            return
        begun = self._clock()
        self._inbox.put(_Begun(work, begun))
        result: ImageRows | Exception | None
        try:
            result = self._host.encode_image(work.image, work.is_over.is_set)
        except Exception as error:
            result = error
        self._inbox.put(_Done(work, result, self._clock() - begun))

    def _give_up(self, begun: _Work) -> None:
        """Of an encoder that does not stop even then, nothing more is to be expected: others end with the same error
        instead of waiting for it."""
        late = self._pending.values() if begun.is_over.is_set() else [begun]
        for work in list(late):
            self._end(work, OverloadedError("An image was not encoded in time."))
        begun.give_up_at = self._clock() + begun.patience

    def _end(self, work: _Work, result: ImageRows | Exception | None) -> None:
        """None: nobody waits for it."""
        del self._pending[work.key]
        work.is_over.set()
        if isinstance(result, Exception):
            work.encoding.error = _as_error(result)
            self._intake.failed(work.encoding)
        elif result is not None:
            work.encoding.rows = result
            self._keep(work.key, work.encoding, result.nbytes)

    def _keep(self, key: _Key, encoding: ImageEncoding, size: int) -> None:
        self._cache[key] = encoding
        self._cached_bytes += size
        while self._cached_bytes > self._max_cached_bytes:
            _, oldest = self._cache.popitem(last=False)
            assert oldest.rows is not None
            self._cached_bytes -= oldest.rows.nbytes


class _Work:
    """An image on its way through the line and the thread."""

    def __init__(self, key: _Key, image: ImageInput, encoding: ImageEncoding) -> None:
        self.key = key
        self.image = image
        self.encoding = encoding
        self.num_bytes = len(image.pixels)
        self.tiles = max(1, -(-self.num_bytes // _TILE_BYTES))
        """Of the usual size, for what it takes."""
        self.patience = _SECONDS_TO_LOAD + _SECONDS_OF_TILE * self.tiles
        """Seconds that it may take."""
        self.wanted_by: set[int] = set()
        """Ids of requests."""
        self.turn: _Turn | None = None
        self.give_up_at = 0.0
        """In the engine's time. Only once it has begun."""
        self.is_over = threading.Event()
        """Its result is not wanted any more, or there."""
        self.is_taken = False
        """By the thread, which alone uses this."""


_Turn = tuple[bool, float]
"""In the background or not, and a time; the least is next."""


class _Turns:
    """Which image is encoded next: that of the request that is first in the order of waiting requests, as if each image
    had come when those before it, of the same request, were encoded. So a request with many does not hold up another
    with one, and none waits for ever. Under the policy `fair` those of a tenant come one after the other like this."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._seconds_of_tile = _USUAL_SECONDS_OF_TILE
        """A moving average."""
        self._served: dict[str | int, float] = {}
        """When a tenant's images, or a request's, would be encoded if there were no others."""

    def next(self, message: AddRequest, tiles: int) -> _Turn:
        """Of the request's next image."""
        is_fair = self._config.policy is Policy.FAIR
        flow: str | int = message.tenant if is_fair else message.ids[0]
        if len(self._served) > _MOST_FLOWS:
            self._served = {flow: end for flow, end in self._served.items() if end > message.arrival_time}
        since = max(message.arrival_time, self._served.get(flow, 0.0))
        self._served[flow] = since + tiles * self._seconds_of_tile
        since = aged(self._config.policy, since, message.priority, self._config.ageing_seconds)
        return (message.background, since)

    def observe(self, tiles: int, seconds: float) -> None:
        self._seconds_of_tile += 0.2 * (seconds / tiles - self._seconds_of_tile)


_MOST_FLOWS = 1024
"""Those that are over are forgotten then."""


class _Begun(NamedTuple):
    work: _Work
    at: float
    """In the engine's time."""


class _Done(NamedTuple):
    work: _Work
    result: ImageRows | Exception | None
    """None: it was given up."""
    seconds: float
    """On the thread."""


def _as_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("an image failed to be encoded", exc_info=error)
    return EngineError("The engine failed to encode an image.")
