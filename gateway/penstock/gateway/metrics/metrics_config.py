"""Which latencies of Triton's families are shown: `--metrics-config`, as Triton takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.gateway.configuration.config import ConfigError

_FLAG = "metrics-config"
_BOOLEANS = {"true": True, "false": False}
_MAX_QUANTILES = 100
_DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = _DEFAULT_QUANTILES
    """Of the summaries, each from 0 to 1."""


def read_metrics_config(texts: Iterable[str]) -> LatencySettings:
    """From `SETTING=VALUE`; the last one of a name counts. Raises ConfigError."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in _SETTINGS:
            raise ConfigError(f"{_FLAG}: {text!r} is not SETTING=VALUE with one of {', '.join(_SETTINGS)}")
        given[name] = value
    return LatencySettings(
        counters=_boolean(given, "counter_latencies", default=True),
        histograms=_boolean(given, "histogram_latencies", default=False),
        summaries=_boolean(given, "summary_latencies", default=False),
        quantiles=_quantiles(given["summary_quantiles"]) if "summary_quantiles" in given else _DEFAULT_QUANTILES,
    )


_SETTINGS = ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")


def _boolean(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise ConfigError(f"{_FLAG}: {name} is true or false, not {value!r}")
    return _BOOLEANS[value]


def _quantiles(text: str) -> tuple[float, ...]:
    """From `0.5:0.05,0.9:0.01`: a quantile and the error that is allowed for it. Ours are always more exact."""
    shares = [_share(pair) for pair in text.split(",")]
    if len(set(shares)) < len(shares) or len(shares) > _MAX_QUANTILES:
        raise ConfigError(f"{_FLAG}: summary_quantiles needs different quantiles, at most {_MAX_QUANTILES}")
    return tuple(shares)


def _share(pair: str) -> float:
    try:
        share, error = (float(part) for part in pair.split(":"))
    except ValueError:
        raise ConfigError(f"{_FLAG}: summary_quantiles: {pair!r} is not QUANTILE:ERROR") from None
    if not (0 <= share <= 1 and 0 <= error <= 1):
        raise ConfigError(f"{_FLAG}: summary_quantiles: {pair!r}: both numbers must be from 0 to 1")
    return share
