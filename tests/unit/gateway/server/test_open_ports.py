"""The order in which the ports of a server end."""

from __future__ import annotations

from typing import Any

from penstock.gateway.requests.call import DrainState
from penstock.gateway.server.open_ports import OpenPorts


class Port:
    def __init__(self, drain: DrainState) -> None:
        self._state = drain
        self.told: list[tuple[str, bool]] = []

    async def leave(self) -> None:
        self.told.append(("leave", self._state.draining))

    def drain(self) -> None:
        self.told.append(("drain", self._state.draining))

    def refuse(self) -> None:
        self.told.append(("refuse", self._state.draining))


async def test_grpc_s_clients_know_before_calls_are_refused() -> None:
    """Most of them take a refusal for the answer of their call."""
    state = DrainState()
    http, grpc = Port(state), Port(state)
    ports: Any = OpenPorts.__new__(OpenPorts)
    vars(ports).update(_http=http, _grpc=grpc)
    await ports.refuse(state)
    assert grpc.told == [("leave", False), ("refuse", True)]
    assert http.told == [("drain", True)]
