"""The server's rate limiter, from `--rate-limit` and `--rate-limit-resource` as Triton takes them."""

from __future__ import annotations

from penstock.classic.batching.rate_limiter import ANY_DEVICE, RateLimiter, Resource
from penstock.gateway.configuration.config import ConfigError

_FLAG = "rate-limit-resource"
_MAX = 2**31 - 1


def build_rate_limiter(mode: str, texts: tuple[str, ...]) -> RateLimiter | None:
    """`mode` is execution_count or off; `texts` are like `memory:4` or `memory:4:0`. None: off. Of a resource that is
    given twice the larger amount counts. Raises ConfigError."""
    if mode == "off":
        if texts:
            raise ConfigError(f"{_FLAG}: needs --rate-limit=execution_count")
        return None
    amounts: dict[Resource, int] = {}
    for text in texts:
        name, *numbers = text.split(":")
        if not name or len(numbers) not in (1, 2):
            raise ConfigError(f"{_FLAG}: {text!r} is neither NAME:COUNT nor NAME:COUNT:DEVICE")
        count, *device = [_number(number, text) for number in numbers]
        resource = (device[0] if device else ANY_DEVICE, name)
        amounts[resource] = max(count, amounts.get(resource, 0))
    return RateLimiter(amounts)


def _number(number: str, text: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) <= 10 and int(number) <= _MAX):
        raise ConfigError(f"{_FLAG}: {number!r} in {text!r} is not a number from 0 to {_MAX}")
    return int(number)
