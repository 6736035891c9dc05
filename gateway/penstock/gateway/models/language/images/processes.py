"""The processes that decode images (`decoder`): started when the first image comes, ended where one takes too long."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from typing import BinaryIO, cast

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.cores import usable_cores
from penstock.gateway.models.language.images.decoder import ANSWER, SIZE, order_of
from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage

_MOST_PROCESSES = 4
_SECONDS = 30.0
"""For one image. The largest takes a few seconds of a core."""
_COMMAND = ("-m", "penstock.gateway.models.language.images.decoder")


class ImageProcesses:
    """Called from threads: each call has a process for itself, and waits for one if need be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._free = threading.Semaphore(max(1, min(_MOST_PROCESSES, usable_cores() // 2)))

    def prepare(self, file: bytes, how: ImageFamily, where: str) -> PreparedImage:
        """Raises InvalidRequestError for what is no image, or one that is too large. `where`: the client's name for
        it."""
        with self._free:
            process = self._take()
            answer = _ordered_within_time(process, file, how)
            if answer is None:
                _end(process)
                raise _refused(where, "it could not be decoded within the bounds of time and memory")
            with self._lock:
                self._idle.append(process)
        failed, prepared = answer
        if failed:
            raise _refused(where, prepared.pixels.decode())
        return prepared

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *_COMMAND], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )


PROCESSES = ImageProcesses()
"""Of this process. They end with it."""


def _ordered_within_time(
    process: subprocess.Popen[bytes], file: bytes, how: ImageFamily
) -> tuple[bool, PreparedImage] | None:
    """Whether it was refused, and the answer; None: the process has ended, or is of no use any more."""
    timer = threading.Timer(_SECONDS, process.kill)
    timer.start()
    try:
        return _ordered(cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout), file, how)
    except OSError:
        return None
    finally:
        timer.cancel()


def _ordered(orders: BinaryIO, answers: BinaryIO, file: bytes, how: ImageFamily) -> tuple[bool, PreparedImage] | None:
    orders.write(order_of(file, how))
    orders.write(file)
    orders.flush()
    head = answers.read(ANSWER.size)
    if len(head) < ANSWER.size:
        return None
    failed, rows, columns, count, size = ANSWER.unpack(head)
    sizes, rest = answers.read(count * SIZE.size), answers.read(size)
    if len(rest) < size:
        return None
    return bool(failed), PreparedImage(rest, tuple(SIZE.iter_unpack(sizes)), rows, columns)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            cast(BinaryIO, pipe).close()
    process.wait()


def _refused(where: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: the image cannot be read: {reason}.", param=where)
