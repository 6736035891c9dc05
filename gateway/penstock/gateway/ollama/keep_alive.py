"""`keep_alive`: how long a model stays loaded behind a request."""

from __future__ import annotations

import math

from penstock.engines.errors import InvalidRequestError
from penstock.engines.quantities import parse_duration
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.model_sleep import ModelSleep

_FOR_EVER = 100 * 365 * 86400.0
"""As long as that, or longer: neither timers nor dates go on for ever."""


def seconds_of(keep_alive: float | str) -> float:
    """Of a number of seconds, or a text such as "5m" or "1h30m". Negative: for ever. Raises InvalidRequestError."""
    negative = isinstance(keep_alive, str) and keep_alive.startswith("-")
    try:
        seconds = parse_duration(keep_alive.removeprefix("-")) if isinstance(keep_alive, str) else float(keep_alive)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        message = 'keep_alive must be a number of seconds, or a duration such as "5m".'
        raise InvalidRequestError(message, param="keep_alive")
    return -seconds if negative else seconds


def keep(sleep: ModelSleep, keep_alive: float | str | None, context: RequestContext) -> None:
    """Carries it out where models fall asleep. Elsewhere they stay loaded. Raises InvalidRequestError."""
    if keep_alive is None:
        return
    seconds = seconds_of(keep_alive)
    if sleep.falls_asleep:
        sleep.keep(seconds if 0 <= seconds < _FOR_EVER else None)
    elif seconds == 0:
        context.ignore("keep_alive", "models stay loaded on this server.")
