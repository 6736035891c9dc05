"""`keep_alive`: how long a model stays loaded behind a request."""

from __future__ import annotations

import math

from penstock.engines.errors import InvalidRequestError
from penstock.engines.quantities import parse_duration
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.language_models import LanguageModels
from penstock.gateway.llm.models import LoadedModel

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


def lets_go(keep_alive: float | str | None) -> bool:
    """Whether the model is to go when its requests have ended. Raises InvalidRequestError."""
    return keep_alive is not None and not seconds_of(keep_alive)


def keep(models: LanguageModels, model: LoadedModel, keep_alive: float | str, context: RequestContext) -> bool:
    """Carries it out for models that fall asleep or are loaded on demand. False: this one stays loaded.
    Raises InvalidRequestError."""
    seconds = seconds_of(keep_alive)
    followed = models.keep(model, seconds if 0 <= seconds < _FOR_EVER else None, context)
    if not (followed or seconds):
        context.ignore("keep_alive", "this model stays loaded.")
    return followed
