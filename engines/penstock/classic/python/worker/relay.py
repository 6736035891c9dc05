"""Requests to other models by processes that the model has forked, such as those of a multiprocessing.Pool.

The socket to the server is the model's own process's alone: that one asks for the others. Each request brings a
connection of its own through a door that all forked processes inherit.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .connection import Pack
from .errors import ErrorCode, TritonError, TritonModelException
from .response import InferenceResponse
from .tensor import Tensor
from .wire import Array, Packer

if TYPE_CHECKING:
    from .host import Host

_Fields = tuple[str, str, Array]
"""Name, datatype and bits of a tensor."""


class _Whole(Packer):
    """Leaves tensors as they are."""

    def __init__(self) -> None:
        """It needs no store."""

    def tensor(self, name: str, datatype: str, array: Array, encoded: bytes | None = None) -> list[Any]:
        return [name, datatype, array]


class Relay:
    """There is one in a process. Nothing is opened before the model forks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._doors: tuple[socket.socket, socket.socket] | None = None
        """The model's own end, and that of all others."""
        self.forked = False
        """This process is one of the others."""
        os.register_at_fork(before=self._open, after_in_child=self._leave)

    def _open(self) -> None:
        if self._doors is None and not self.forked:
            self._doors = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            threading.Thread(target=self._accept, args=(self._doors[0],), name="penstock-relay", daemon=True).start()

    def _leave(self) -> None:
        if self._doors is not None and not self.forked:
            self._doors[0].close()
        self.forked = True

    # In a forked process

    def infer(self, pack: Pack) -> InferenceResponse:
        """Raises TritonModelException where the model's own process has gone."""
        assert self._doors is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._doors[1], [b"+"], [theirs.fileno()])
            with _pipe(ours.detach()) as pipe:
                pipe.send(pack(_Whole()))
                outputs, parameters, error = pipe.recv()
        except (OSError, EOFError):
            raise TritonModelException("The model's own process, which asks other models, has ended.") from None
        found = InferenceResponse(
            [_tensor(*fields) for fields in outputs],
            None if error is None else TritonError(error[1], ErrorCode(error[0])),
        )
        found._parameters = parameters
        return found

    # In the model's own process

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                received, descriptors, _, _ = socket.recv_fds(door, 1, 1)
            except OSError:
                return
            if not received:
                return
            for descriptor in descriptors:
                threading.Thread(target=self._serve, args=(descriptor,), name="penstock-relayed", daemon=True).start()

    def _serve(self, descriptor: int) -> None:
        with _pipe(descriptor) as pipe, suppress(OSError, EOFError):  # the other process may end
            about, inputs = pipe.recv()
            pipe.send(self._answer(about, [_tensor(*fields) for fields in inputs]))

    def _answer(self, about: list[Any], inputs: list[Tensor]) -> tuple[list[_Fields], dict[str, Any], Any]:
        try:
            message = self._host.ask("infer", lambda packer: [about, [each.pack(packer) for each in inputs]]).result()
        except TritonModelException as error:
            return [], {}, (int(ErrorCode.INTERNAL), str(error))
        response = self._host.response(message.fields[0], message)
        error = response.error()
        told = None if error is None else (int(error.code()), error.message())
        return [_fields(each) for each in response.output_tensors()], response._parameters, told


def _pipe(descriptor: int) -> Any:
    from multiprocessing.connection import Connection  # most models fork nothing

    return Connection(descriptor)


def _fields(tensor: Tensor) -> _Fields:
    return tensor.name(), tensor._datatype, tensor._bits()


def _tensor(name: str, datatype: str, bits: Array) -> Tensor:
    tensor = Tensor(name, bits)
    tensor._datatype = datatype
    return tensor
