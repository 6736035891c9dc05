"""Doors of engines for the fronts of this server: sockets in a folder of its own."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorAddress, DoorSpec
from penstock.engines.process.client import ProcessEngine

_IPC = "ipc://"


class Doors:
    def __init__(self, folder: Path, fronts: int) -> None:
        self._folder = folder
        self._clients = 2 * fronts + 2
        """One that takes another's place may come before that one is known to have gone."""
        self._numbers = count(1)

    def new(self) -> DoorSpec:
        """For one more engine."""
        return DoorSpec(address=f"{_IPC}{self._folder}/engine-{next(self._numbers)}", max_clients=self._clients)


def door_of(engine: Engine) -> DoorAddress | None:
    """None: only the process that has started it can use this engine."""
    door = engine.door if isinstance(engine, ProcessEngine) else None
    return door if door is not None and door.address.startswith(_IPC) else None
