"""Brings the outputs of a step to the streams that wait for them; used by all engines of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    FinishReason,
    RequestError,
    RequestOutput,
)
from penstock.engines.errors import PenstockError


class StreamTable:
    """Which stream gets the outputs of which id. An id is known from `submit` until its one terminal output.

    `send` brings messages to the engine.
    """

    def __init__(self, send: Callable[[Sequence[DownMessage]], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._streams: dict[int, RequestStream] = {}
        self._listening: list[RequestStream] = []
        """Streams whose listeners must be called."""
        self.sent = 0
        """Samples that were sent to the engine since it started."""

    def __len__(self) -> int:
        return len(self._streams)

    def new_ids(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        stream = RequestStream((i for request in requests for i in request.ids), self.abort)
        self._send(requests)
        self.sent += len(stream.live_ids)
        stream.arrival_number = self.sent
        self._streams.update((request_id, stream) for request in requests for request_id in request.ids)
        return stream

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """The one loop over a step's outputs. Late outputs of ids that have ended are dropped. Call `call_listeners`
        once for all steps that arrived together: tokens of several steps merge when the gateway is busy."""
        streams, listening = self._streams, self._listening
        for output in outputs:
            stream = streams.get(output.id)
            if stream is not None:
                if stream.add(output):
                    listening.append(stream)
                if output.finish_reason is not None:
                    del streams[output.id]

    def call_listeners(self) -> None:
        listening, self._listening = self._listening, []
        for stream in listening:
            stream.call_listener()

    def abort(self, ids: Iterable[int]) -> None:
        """Ends the streams of these ids at once, and tells the engine which of them were still live."""
        ended = [request_id for request_id in ids if request_id in self._streams]
        for request_id in ended:
            self._streams.pop(request_id).end(request_id, FinishReason.ABORT)
        if ended:
            self._send([AbortRequests(ended)])

    def give_up(self) -> None:
        """Aborts everything in the engine, while the streams still wait for their end."""
        if self._streams:
            self._send([AbortRequests(list(self._streams))])

    def fail_all(self, error: PenstockError) -> None:
        """The engine is gone: ends everything that is live with this error."""
        self.sent = 0
        wire = RequestError.of(error)
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(wire)
