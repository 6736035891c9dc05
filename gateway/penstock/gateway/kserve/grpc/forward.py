"""Metadata of an RPC that goes to the model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.engines.classic.messages import Parameter
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.kserve.parameters import RESERVED


def forwarded(metadata: Iterable[tuple[str, str | bytes]], pattern: re.Pattern[str]) -> dict[str, Parameter]:
    """Text metadata whose whole name matches, as string parameters. Raises InvalidRequestError when such a name is
    reserved: a header must not change what the request's own parameters say."""
    found: dict[str, Parameter] = {}
    for name, value in metadata:
        if not isinstance(value, str) or not pattern.fullmatch(name):
            continue
        if name in RESERVED or name.startswith("triton_"):
            raise InvalidRequestError(f"the metadata '{name[:64]}' has the name of a reserved parameter")
        found[name] = value
    return found
