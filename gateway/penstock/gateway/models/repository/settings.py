"""Settings of model repositories, of their response cache and of their rate limiter, as Triton's options have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.classic.batching.rate_limiter import ANY_DEVICE, RateLimiter, Resource
from penstock.classic.caching.cache import LocalCache, ResponseCache
from penstock.engines.quantities import parse_size
from penstock.gateway.configuration.config import ConfigError

ControlMode = Literal["none", "poll", "explicit"]

ALL_MODELS = "*"
"""In `load_models`: every model of the repositories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    control_mode: ControlMode = "none"
    """none: everything is loaded at the start, and that is that. poll: changes are looked for every `poll_seconds`.
    explicit: `load_models` at the start, the rest when it is asked for."""
    poll_seconds: float = 15.0
    load_models: tuple[str, ...] = ()
    """Names, or `*`; explicit mode only."""
    strict_readiness: bool = True
    """The server is ready only while every model that should be loaded is."""
    missing: tuple[str, ...] = ()
    """Repositories that are not there: under strict readiness the server is never ready."""
    exit_on_error: bool = True
    """A model that cannot be loaded at the start stops the server."""
    auto_complete: bool = True
    """Backends fill in what the configuration leaves out and the model's file tells."""
    load_threads: int = 4
    """Model versions that are loaded at the same time."""
    load_retries: int = 0
    """Further attempts for a version that cannot be loaded."""
    config_name: str = ""
    """`configs/<config_name>.pbtxt` counts instead of config.pbtxt, where a model has it."""
    gpus: int = 0
    """GPUs that instance groups may be placed on."""
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings for backends, by backend; those under "" are for all of them."""


_FLAG = "cache-config"


def build_cache(texts: tuple[str, ...], byte_size: int) -> ResponseCache | None:
    """`texts` are like `local,size=1048576`; `byte_size` is the older flag's, 0: not given. None: no cache.

    Raises ConfigError.
    """
    options: dict[str, dict[str, str]] = {"local": {"size": str(byte_size)}} if byte_size else {}
    for text in texts:
        head, equals, value = text.partition("=")
        kind, comma, name = head.partition(",")
        if kind not in _CACHES or not (comma and name and equals):
            raise ConfigError(f"{_FLAG}: {text!r} is neither local,KEY=VALUE nor redis,KEY=VALUE")
        options.setdefault(kind, {})[name] = value
    if len(options) > 1:
        raise ConfigError(f"{_FLAG}: a server has one response cache, local or redis")
    for kind, values in options.items():
        return _CACHES[kind](values)
    return None


def _local(options: Mapping[str, str]) -> ResponseCache:
    _check_names("local", options, {"size"})
    try:
        size = parse_size(options.get("size", ""))
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: local,size: {error}") from None
    if size == 0:
        raise ConfigError(f"{_FLAG}: local,size must be at least 1 byte")
    return LocalCache(size)


_REDIS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "host": ("host", lambda _, value: value),
    "port": ("port", lambda name, value: _number(name, value)),
    "user": ("username", lambda _, value: value),
    "password": ("password", lambda _, value: value),
    "db": ("db", lambda name, value: _number(name, value)),
    "socket_timeout": ("socket_timeout", lambda name, value: _seconds(name, value)),
    "connect_timeout": ("socket_connect_timeout", lambda name, value: _seconds(name, value)),
    "connection_timeout": ("socket_connect_timeout", lambda name, value: _seconds(name, value)),
    "pool_size": ("max_connections", lambda name, value: _number(name, value)),
    "tls_enabled": ("ssl", lambda name, value: _boolean(name, value)),
    "cert": ("ssl_certfile", lambda _, value: value),
    "key": ("ssl_keyfile", lambda _, value: value),
    "cacert": ("ssl_ca_certs", lambda _, value: value),
    "cacert_dir": ("ssl_ca_path", lambda _, value: value),
}
"""Options of Triton's redis_cache: the argument of `redis.asyncio.Redis`, and how it is read. Times: milliseconds.
`connection_timeout` is an older name of ours."""

_REDIS_DEFAULTS = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
"""Seconds. A cache that is slower than that is worth little."""


def _redis(options: Mapping[str, str]) -> ResponseCache:
    _check_names("redis", options, set(_REDIS))
    if "host" not in options:
        raise ConfigError(f"{_FLAG}: redis needs redis,host=NAME")
    arguments: dict[str, Any] = dict(_REDIS_DEFAULTS)
    for variable, name in (("TRITONCACHE_REDIS_USERNAME", "username"), ("TRITONCACHE_REDIS_PASSWORD", "password")):
        if os.environ.get(variable):
            arguments[name] = os.environ[variable]
    for name, value in options.items():
        argument, read = _REDIS[name]
        arguments[argument] = read(f"redis,{name}", value)
    try:
        from penstock.classic.caching.redis_cache import RedisCache
    except ImportError:
        raise ConfigError(f"{_FLAG}: redis needs an extra: pip install 'penstock-server[redis]'") from None
    return RedisCache(arguments)


_CACHES: Mapping[str, Callable[[Mapping[str, str]], ResponseCache]] = {"local": _local, "redis": _redis}


def _check_names(kind: str, options: Mapping[str, str], known: set[str]) -> None:
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"{_FLAG}: {kind} has no option {unknown[0]!r}, only {', '.join(sorted(known))}")


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise ConfigError(f"{_FLAG}: {name} is a number, not {value!r}")
    return int(value)


def _seconds(name: str, value: str) -> float | None:
    """None, without a limit, for 0."""
    return _number(name, value) / 1000 or None


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{_FLAG}: {name} is true or false, not {value!r}")
    return value.lower() == "true"


_RATE_FLAG = "rate-limit-resource"
_MAX = 2**31 - 1


def build_rate_limiter(mode: str, texts: tuple[str, ...]) -> RateLimiter | None:
    """`mode` is execution_count or off; `texts` are like `memory:4` or `memory:4:0`. None: off. Of a resource that is
    given twice the larger amount counts. Raises ConfigError."""
    if mode == "off":
        if texts:
            raise ConfigError(f"{_RATE_FLAG}: needs --rate-limit=execution_count")
        return None
    amounts: dict[Resource, int] = {}
    for text in texts:
        name, *numbers = text.split(":")
        if not name or len(numbers) not in (1, 2):
            raise ConfigError(f"{_RATE_FLAG}: {text!r} is neither NAME:COUNT nor NAME:COUNT:DEVICE")
        count, *device = [_resource_number(number, text) for number in numbers]
        resource = (device[0] if device else ANY_DEVICE, name)
        amounts[resource] = max(count, amounts.get(resource, 0))
    return RateLimiter(amounts)


def _resource_number(number: str, text: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) <= 10 and int(number) <= _MAX):
        raise ConfigError(f"{_RATE_FLAG}: {number!r} in {text!r} is not a number from 0 to {_MAX}")
    return int(number)
