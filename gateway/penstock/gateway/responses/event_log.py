"""The events of a response in the background, as a stream."""

from __future__ import annotations

from penstock.gateway.generating.event_log import EventLog
from penstock.gateway.generating.streams import send_frames
from penstock.gateway.http.error_form import OpenAIErrors
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.responses.events import error_event


async def send_events(exchange: Exchange, log: EventLog, after: int, heartbeat_s: float) -> None:
    """As a stream, until the last one. Raises InvalidRequestError."""
    log.check(after)
    exchange.error_form = _LogErrors(log)
    await send_frames(exchange, log.follow(after, heartbeat_s or None))


class _LogErrors(OpenAIErrors):
    """Of one reader: the response itself may go on."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return error_event(error, self._log.number)
