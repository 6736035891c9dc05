"""Where a model host listens, and how a front and it meet: the first bytes carry the files of their shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.python.link import ArenaFiles
from penstock.engines.errors import EngineError, NotReadyError

_HELLO = struct.Struct("<8sQ")
_MAGIC = b"penhost1"
"""The last character is the version of all that is said behind it: both sides are always of one version."""
_SECONDS = 10.0
_PEER = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """Only processes of this user are let in. Raises EngineError when there can be no socket at the path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise EngineError(f"cannot make a socket at {path} (TMPDIR sets the folder): {error}") from None
    return listener


def accept(listener: socket.socket, number: int) -> tuple[socket.socket, ArenaFiles] | None:
    """The next front, which has this number from now on; None when there is none, or it may not come in."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    try:
        sock.setblocking(False)
        if _peer(sock)[1] != os.geteuid():
            sock.close()
            return None
        files = ArenaFiles("penstock-models")
    except OSError:
        sock.close()
        return None
    try:
        socket.send_fds(sock, [_HELLO.pack(_MAGIC, number)], [files.down, files.up])
    except OSError:
        sock.close()
        files.close()
        return None
    return sock, files


@dataclass(frozen=True, slots=True)
class Joined:
    """What a front has when it has been let in."""

    sock: socket.socket
    number: int
    """The front's, from 1 on."""
    host: int
    """The host's process id."""
    receive_file: int
    send_file: int


def connect(path: Path) -> Joined:
    """Blocks for some seconds at most. Raises NotReadyError when nobody answers there."""
    with contextlib.ExitStack() as closing:
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        sock.settimeout(_SECONDS)
        try:
            sock.connect(str(path))
            hello, files, _, _ = socket.recv_fds(sock, _HELLO.size, 2)
        except OSError as error:
            raise NotReadyError(f"the model host does not answer at {path}: {error}") from None
        for file in files:
            closing.callback(os.close, file)
        if len(hello) != _HELLO.size or len(files) != 2 or hello[:8] != _MAGIC:
            raise NotReadyError(f"what answers at {path} is no model host of this version")
        sock.setblocking(False)
        found = Joined(sock, _HELLO.unpack(hello)[1], _peer(sock)[0], *files)
        closing.pop_all()
        return found


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other side."""
    process, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user
