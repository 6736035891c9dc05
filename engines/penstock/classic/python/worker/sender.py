"""pb_utils.InferenceResponseSender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from .arguments import integer, of_type
from .errors import TritonModelException
from .response import InferenceResponse

COMPLETE_FINAL = 1


class Outlet(Protocol):
    """Where the responses of a request go."""

    decoupled: bool
    iterative: bool
    """Its requests may be rescheduled."""

    def respond(
        self, call: int, response: InferenceResponse | None, final: bool, requested: Collection[str] | None
    ) -> None: ...

    def abandoned(self, call: int) -> None:
        """Nobody can answer the request any more."""
        ...

    def cancelled(self, call: int) -> bool: ...


class ResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, outlet: Outlet, call: int, requested: Collection[str] | None) -> None:
        self._outlet = outlet
        self._call = call
        self._requested = requested
        self._lock = threading.Lock()
        self.sent = 0
        self.closed = False

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
            self._outlet.respond(self._call, response, flags == COMPLETE_FINAL, self._requested)
        elif response is not None:
            # the one response is the end of the request, whether its flag comes with it, later or never
            self._outlet.respond(self._call, response, True, self._requested)

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
