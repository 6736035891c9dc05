"""Server processes: started on free ports, waited for, and always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

from benchmarks.peers.shell import OFFLINE, tail
from penstock.loadtest.errors import LoadTestError

_LOOK_SECONDS = 0.1
_END_SECONDS = 20.0


class Ports(NamedTuple):
    http: int
    grpc: int
    metrics: int


def free_ports() -> Ports:
    """Free a moment ago: none of the peers can choose a port by itself and say which."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in Ports._fields]
    try:
        return Ports(*(listener.getsockname()[1] for listener in sockets))
    finally:
        for listener in sockets:
            listener.close()


class Process:
    """A program in a group of its own, so that Ctrl-C reaches us alone and nothing of it stays behind."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        pipes: bool = False,
    ) -> None:
        """`cores`: those it may run on; all of them if empty. `pipes`: to its standard input and output."""
        self.log = log
        self._began = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        with log.open("wb") as file, confined_to(cores):
            try:
                self._process = subprocess.Popen(
                    [*map(str, argv)],
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else file,
                    stderr=file,
                    env=clean | OFFLINE | dict(env or {}),
                    start_new_session=True,
                )
            except OSError as error:
                raise LoadTestError(f"{argv[0]}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def stdin(self) -> IO[bytes]:
        return self._pipe(self._process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        return self._pipe(self._process.stdout)

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise ValueError("started without pipes")
        return pipe

    def failure(self, what: str) -> LoadTestError:
        return LoadTestError(f"{what}\n  log: {self.log}\n{tail(self.log)}")

    def wait_until_ready(self, url: str, seconds: float) -> float:
        """Until GET says 200; the seconds since the start. Raises LoadTestError."""
        while self.age < seconds:
            if self._process.poll() is not None:
                raise self.failure(f"it ended with {self._process.returncode} before it was ready")
            if _answers(url):
                return self.age
            time.sleep(_LOOK_SECONDS)
        raise self.failure(f"it was not ready within {seconds:g} s")

    def end(self) -> None:
        """Asks it to end, then makes all of its group end."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # not everybody listens
                self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a job that nobody took
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.pid, number)


@contextmanager
def confined_to(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and what it starts meanwhile, which stays confined."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError, ValueError):
        return False
