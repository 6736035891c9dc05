"""What an engine process is told to do."""

from __future__ import annotations

import msgspec

from penstock.engines.registry import EngineSpec


class Order(msgspec.Struct, frozen=True):
    """Travels as one line of JSON."""

    address: str
    """Of the gateway's socket."""
    log_level: str
    spec: EngineSpec
