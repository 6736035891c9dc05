"""Real routers as processes, and load on them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.server import wait_until


@contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """A process that is ready. Where it ends or does not become ready, its log is the error's text."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            wait_until(lambda: process.poll() is not None or _holds(ready), 60)
            if process.returncode is not None:
                raise AssertionError(f"{command[0]} ended:\n{log.read_text()[-4000:]}")
            yield
        except AssertionError as error:
            error.add_note(log.read_text()[-4000:])
            raise
        finally:
            process.terminate()  # nginx's workers outlive a process that is killed
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _holds(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except httpx.TransportError:
        return False


@dataclass
class Load:
    """Clients that ask one request after the other, until they are stopped."""

    url: str
    bodies: Callable[[int, int], dict[str, Any]]
    """The request of (client, number)."""
    num_clients: int = 8
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for client in range(self.num_clients):
            thread = threading.Thread(target=self._ask, args=(client,))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answer_more(self, count: int) -> None:
        """Returns when so many more have been answered."""
        goal = self.answered + count
        wait_until(lambda: self.answered >= goal or bool(self.failures), 60)

    def _ask(self, client: int) -> None:
        number = 0
        with httpx.Client(timeout=60) as connection:
            while not self._stop.is_set():
                body = self.bodies(client, number)
                number += 1
                problem = _problem(connection, self.url, body)
                if problem:
                    self.failures.append(problem)
                self.answered += 1


def _problem(connection: httpx.Client, url: str, body: dict[str, Any]) -> str:
    """Of one request; "" where it is answered whole."""
    try:
        answer = connection.post(url, json=body)
    except httpx.TransportError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    if body.get("stream"):
        whole = answer.text.rstrip().endswith("data: [DONE]") and 'data: {"error"' not in answer.text
        return "" if whole else answer.text[-300:]
    return "" if answer.json()["usage"]["completion_tokens"] == body["max_tokens"] else answer.text[:300]
