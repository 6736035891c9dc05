"""pb_utils.InferenceResponseSender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from .arguments import integer, of_type
from .errors import TritonModelException
from .response import InferenceResponse

COMPLETE_FINAL = 1
_AHEAD, _AHEAD_BYTES = 1024, 16 * 1024 * 1024
"""Responses, and bytes of their tensors, after which a paced sender looks whether there is room for more."""


class Outlet(Protocol):
    """Where the responses of a request go."""

    decoupled: bool
    iterative: bool
    """Its requests may be rescheduled."""

    def respond(
        self, call: int, response: InferenceResponse | None, final: bool, requested: Collection[str] | None
    ) -> int:
        """Returns the bytes of its tensors."""
        ...

    def wait_for_room(self, call: int) -> None:
        """Returns when not too many responses are unread."""
        ...

    def abandoned(self, call: int) -> None:
        """Nobody can answer the request any more."""
        ...

    def cancelled(self, call: int) -> bool: ...


class ResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, outlet: Outlet, call: int, requested: Collection[str] | None, *, paced: bool = False) -> None:
        """`paced`: a thread that sends much waits for the reader of the responses."""
        self._outlet = outlet
        self._call = call
        self._requested = requested
        self._lock = threading.Lock()
        self.sent = 0
        self.closed = False
        self._paced = paced
        self._ahead = self._bytes_ahead = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Raises TritonModelException, with Triton's texts, for what this request cannot be sent any more."""
        if response is not None:
            of_type(response, InferenceResponse, "response")
        if integer(flags, "flags", 32) not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self.advance(response, flags)
        if self._outlet.decoupled:
            size = self._outlet.respond(self._call, response, flags == COMPLETE_FINAL, self._requested)
            if self._paced and not flags:
                self._keep_pace(size)
        elif response is not None:
            # the one response is the end of the request, whether its flag comes with it, later or never
            self._outlet.respond(self._call, response, True, self._requested)

    def _keep_pace(self, size: int) -> None:
        self._ahead += 1
        self._bytes_ahead += size
        if self._ahead >= _AHEAD or self._bytes_ahead >= _AHEAD_BYTES:
            self._ahead = self._bytes_ahead = 0
            self._outlet.wait_for_room(self._call)

    def advance(self, response: Any, flags: int) -> None:
        """The state after this response. Raises TritonModelException when it must not be sent."""
        with self._lock:
            if not self._outlet.decoupled:
                if response is not None and self.sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self.sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self.closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self.sent += response is not None
            self.closed = flags == COMPLETE_FINAL

    def close(self) -> None:
        """The request has been ended otherwise."""
        self.closed = True

    @property
    def ended(self) -> bool:
        return self.closed or (self.sent > 0 and not self._outlet.decoupled)

    def is_cancelled(self) -> bool:
        return self._outlet.cancelled(self._call)

    def __del__(self) -> None:
        if not self.ended:
            self._outlet.abandoned(self._call)


SenderFactory = Callable[[], ResponseSender]
