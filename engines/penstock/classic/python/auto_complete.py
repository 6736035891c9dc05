"""Runs a model's auto_complete_config in a process that lives no longer than that."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from typing import IO, Any

from penstock.classic.base import abandoned
from penstock.classic.python.output import lines_of
from penstock.classic.python.process import Launch, prepared
from penstock.classic.python.worker.wire import FRAME, decode, frame
from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.failure_text import one_line

_IMPORT_SECONDS = 600.0
"""For the model's imports, which Triton does not limit at all; they are long where a file system is cold."""
_MORE_TIME = "--backend-config=python,stub-timeout-seconds=<seconds> gives it more time"


def run_auto_complete(launch: Launch, options: dict[str, Any]) -> dict[str, Any] | None:
    """The completed configuration; None when the model has no auto_complete_config. In a thread.

    Raises ValueError: the model's own error, or that there was no answer in time.
    """
    limit = launch.options.stub_timeout_seconds
    with tempfile.TemporaryFile() as output:
        with prepared(launch, BlackBox()) as (command, variables, ours, files, passed):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                env=variables,
                start_new_session=True,
            )
        if (gone := abandoned.get(None)) is not None:
            gone.add_done_callback(lambda _: process.kill())
        try:
            kind, fields = _converse(ours, options, limit)
        except (EOFError, ConnectionError):
            raise ValueError(f"the process for auto_complete_config ended early{launch.environment.hint}") from None
        finally:
            ours.close()
            files.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _log(launch.logger_name, output)
    if kind == "completed":
        found: dict[str, Any] | None = fields[0]
        return found
    text, trace = fields
    logging.getLogger(launch.logger_name).debug("%s", trace)
    raise ValueError(one_line(text))


def _converse(sock: socket.socket, options: dict[str, Any], limit: float) -> tuple[str, list[Any]]:
    _receive(sock, limit, f"the process for auto_complete_config did not start within {limit:g} s; {_MORE_TIME}")
    sock.sendall(frame(["auto_complete", [], [], options]))
    kind, fields = _receive(sock, _IMPORT_SECONDS, f"the model's imports did not end within {_IMPORT_SECONDS:g} s")
    if kind != "imported":
        return kind, fields
    return _receive(sock, limit, f"auto_complete_config gave no answer within {limit:g} s; {_MORE_TIME}")


def _receive(sock: socket.socket, limit: float, complaint: str) -> tuple[str, list[Any]]:
    """The next message. Raises ValueError, with the complaint, after `limit` seconds."""
    deadline = time.monotonic() + limit
    try:
        return _message(sock, deadline)
    except TimeoutError:
        raise ValueError(complaint) from None


def _message(sock: socket.socket, deadline: float) -> tuple[str, list[Any]]:
    head, tail = FRAME.unpack(_exactly(sock, FRAME.size, deadline))
    kind, _, _, *fields = decode(_exactly(sock, head + tail, deadline)[:head])
    return kind, fields


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        data = sock.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return found


def _log(name: str, output: IO[bytes]) -> None:
    output.seek(0)
    logger = logging.getLogger(name)
    for line in output.read(1024 * 1024).splitlines():
        for text in lines_of(line):
            logger.info("%s", text)
