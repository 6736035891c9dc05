"""Parts of a mix: `WEIGHT NAME key=value ...`."""

from __future__ import annotations

import math
import shlex

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import WorkloadOptions

SYNTHETIC = ("prompt_tokens", "prompt_tokens_stddev", "shared_prefix_tokens", "prefixes")
SETTINGS = (*SYNTHETIC, "output_tokens", "output_tokens_stddev", "turns", "turn_delay", "dataset")
"""What parts can differ in."""


class Share(msgspec.Struct, frozen=True):
    weight: float
    name: str
    options: WorkloadOptions


def shares(workload: WorkloadOptions) -> list[Share]:
    """The parts of the workload: those of the mix, which have its settings where they have none of their own, or
    itself. Raises LoadTestError."""
    parts = [_share(text, workload) for text in workload.mix] or [Share(1.0, "", workload)]
    names = [share.name for share in parts]
    if len(set(names)) < len(names):
        raise LoadTestError(f"mix: two parts are called {max(names, key=names.count)}")
    return parts


def keeps_text(workload: WorkloadOptions) -> bool:
    """Whether sessions go on from answers, so that clients must keep their text. Raises LoadTestError."""
    return any(share.options.turns > 1 for share in shares(workload))


def _share(text: str, workload: WorkloadOptions) -> Share:
    try:
        weight, name, *settings = shlex.split(text)
        parsed = float(weight)
    except ValueError:
        raise LoadTestError(f"mix: {text!r} is not 'WEIGHT NAME key=value ...'") from None
    if not 0 < parsed < math.inf or "=" in name:
        raise LoadTestError(f"mix: {text!r} is not 'WEIGHT NAME key=value ...' with a weight above 0")
    chosen: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in SETTINGS:
            raise LoadTestError(f"mix: {name}: {setting!r} is none of {', '.join(SETTINGS)} with a value")
        chosen[key] = value
    inherited = {key: getattr(workload, key) for key in SETTINGS if "dataset" not in chosen or key not in SYNTHETIC}
    try:
        options = msgspec.convert(inherited | chosen, WorkloadOptions, strict=False)
    except msgspec.ValidationError as error:
        raise LoadTestError(f"mix: {name}: {error}") from None
    return Share(parsed, name, options)
