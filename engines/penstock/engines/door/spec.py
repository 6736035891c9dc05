"""Doors of engine processes: where others than the owner reach one, and what these may take."""

from __future__ import annotations

import msgspec

from penstock.engines.host.content_digest import ANY_MODEL, ModelDigests


class DoorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A door of an engine process. Bounds hold for each client; one that goes over them is disconnected, which ends its
    requests and nobody else's."""

    address: str
    """As ZeroMQ writes it: ipc://PATH in a folder of this user alone, or tcp://HOST:PORT."""
    key: str = ""
    """What both sides know (`keys.read_key`); travels to the process through its stdin. tcp needs it."""
    model: ModelDigests = ANY_MODEL
    """Of the model's files; clients that expect others are refused."""
    max_clients: int = 64
    max_message_bytes: int = 32 << 20
    """Of a message from a client: a prompt has about 5 bytes a token."""
    max_unread_bytes: int = 64 << 20
    """What a client has been sent and has not said to have read."""
    max_untaken_bytes: int = 256 << 20
    """What a client has sent and the engine, busy with a long step, has not taken in."""
    client_timeout: float = 30.0
    """Seconds of silence after which a client is gone."""


class DoorAddress(msgspec.Struct, frozen=True):
    """What a client must know to reach a door."""

    address: str
    key: str = ""
