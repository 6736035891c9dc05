"""How fronts reach the engines that the supervisor has started."""

from __future__ import annotations

import msgspec

from penstock.engines.client.engine import Engine


class EngineDoor(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    key: str


def door_of(engine: Engine) -> EngineDoor | None:
    """None: only the process that has started it can use this engine."""
    return None


def attached(door: EngineDoor, name: str) -> Engine:
    """`name`: of the front, for the engine's log."""
    raise NotImplementedError
