"""The answer to one line, which is asked again until there is room for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp

from penstock.gateway.batches.lines import Line, answered
from penstock.gateway.front.context import Principal
from penstock.gateway.http.inner_request import ask_in_background
from penstock.gateway.http.settings import AppSettings

_BUSY = frozenset({429, 503})
"""With these a line is asked again: the server, or the model, has no room for it now."""
AGAIN_AFTER_S = 1.0
_ERRORS_FROM = 400


async def answer_line(
    line: Line, endpoints: Mapping[str, ASGIApp], principal: Principal, settings: AppSettings
) -> tuple[bytes, bool]:
    """The line's result, and whether it is an error."""
    while True:
        found = await try_line(line, endpoints, principal, settings)
        if found is not None:
            return found
        await asyncio.sleep(AGAIN_AFTER_S)


async def try_line(
    line: Line, endpoints: Mapping[str, ASGIApp], principal: Principal, settings: AppSettings
) -> tuple[bytes, bool] | None:
    """The same; None where there is no room for it now."""
    answer = await ask_in_background(endpoints[line.url], line.url, line.body, principal, settings)
    if answer.status in _BUSY:
        return None
    return answered(line, answer.status, answer.request_id, answer.body), answer.status >= _ERRORS_FROM
