"""A server that is started, measured and stopped again, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.tune.params import configured

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LOAD_SECONDS = 600.0


def ask(url: str, *, timeout: float, body: Any = None, key: str | None = None) -> tuple[int, bytes]:
    """Status and body; 0 where nobody answers. With a body it is a POST of JSON."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else msgspec.json.encode(body)
    try:
        with _OPENER.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


def configure_model(base: str, model: str, fields: Mapping[str, int], key: str | None) -> None:
    """Loads a model of a repository again, with other fields of its configuration. Raises LoadTestError."""
    status, body = ask(f"{base}/v2/models/{model}/config", timeout=30.0, key=key)
    if status != 200:
        raise LoadTestError(f"{model}: no configuration (status {status}): {body[:200].decode('utf-8', 'replace')}")
    config = msgspec.json.encode(configured(msgspec.json.decode(body), fields)).decode()
    order = {"parameters": {"config": config}}
    status, body = ask(f"{base}/v2/repository/models/{model}/load", timeout=_LOAD_SECONDS, body=order, key=key)
    if status != 200:
        raise LoadTestError(f"{model}: not loaded (status {status}): {body[:300].decode('utf-8', 'replace')}")


_LOOK_SECONDS = 0.1
_TOLD_LINES = 5
"""Of the log of a server that does not start."""


class NotReadyError(Exception):
    """This server cannot be measured: it ended, or was not ready in time. Others may be."""


@contextlib.contextmanager
def running(command: Sequence[str], ready_url: str, *, start_timeout: float, stop_timeout: float) -> Iterator[None]:
    """Inside it runs and is ready; afterwards it is stopped, with all processes it has started. Raises NotReadyError;
    LoadTestError where nothing can be started at all."""
    _check_free(ready_url)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours: we stop it
            )
        except OSError as error:
            raise LoadTestError(f"{command[0]}: {error.strerror or error}") from None
        try:
            _wait(process, ready_url, start_timeout, log)
            yield
        finally:
            _stop(process, stop_timeout)


def _wait(process: subprocess.Popen[bytes], ready_url: str, seconds: float, log: IO[bytes]) -> None:
    deadline = time.monotonic() + seconds
    while ask(ready_url, timeout=5.0)[0] != 200:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(_LOOK_SECONDS)
            raise NotReadyError(f"the server ended with {status}: {_last_words(log)}")
        if time.monotonic() > deadline:
            raise NotReadyError(f"not ready after {seconds:g} s: {_last_words(log)}")


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    return " | ".join(line.strip() for line in lines[-_TOLD_LINES:] if line.strip()) or "it said nothing"


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGTERM, then SIGKILL. Ctrl-C meanwhile kills at once."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # itself, or what it has left behind
        process.wait()


def _check_free(url: str) -> None:
    """Raises LoadTestError when a server listens there: that server would be measured."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname or "127.0.0.1", port), timeout=5.0):
        raise LoadTestError(f"a server listens on {parts.netloc} already; that server would be measured")


def free_ports(count: int) -> list[int]:
    """Of this machine, at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
