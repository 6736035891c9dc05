"""The messages between a client and the door of an engine process, besides those that every engine takes.

A client says Hello once on each connection, then sends requests whose ids it counts from 1: the door adds the client's
prefix for the engine and takes it off again. Times of requests are seconds from the moment of sending, since clocks of
two machines do not agree: `arrival_time` is not above 0, `deadline` is what is left.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from penstock.engines.contract import engine_stats, model_info
from penstock.engines.contract import messages as contract_messages
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    Heartbeat,
    RequestError,
    ResetPrefixCache,
    StepOutputs,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.host.content_digest import ANY_MODEL, ModelDigests

_MEANING = 4
"""Another one when what a message means changes, and its fields do not."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A client's first message. It must be readable for every version of the protocol."""

    version: int
    name: str = ""
    """For the engine's log."""
    model: ModelDigests = ANY_MODEL
    """The model that it expects."""
    wants_steps: bool = False
    """It is told of each step (`StepOutputs.steps`)."""


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """A client lives; answered by a Pong at once, also while a step computes."""

    sent_at: float
    """By the client's clock; comes back."""
    read_bytes: int
    """Of all messages on this connection."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """A client leaves: what it has asked for is not wanted any more."""


class Welcome(msgspec.Struct, array_like=True, tag="welcome", frozen=True):
    """Answers Hello."""

    info: ModelInfo
    fingerprint: str
    """Of all that decides tokens and the hashes of blocks (`registry.engine_fingerprint`)."""
    adapters: list[str]
    """Keys of the LoRA adapters that are loaded."""
    max_adapters: int
    """For how many there is room."""
    policy: str
    """The scheduler's."""
    most_unseen: int
    """Samples that a client may have sent without having seen that they were taken in."""
    max_message_bytes: int
    client_timeout: float


class Farewell(msgspec.Struct, array_like=True, tag="farewell", frozen=True):
    """In place of Welcome, or later: this client is not served any more, and why."""

    error: RequestError


class Leaving(msgspec.Struct, array_like=True, tag="leaving", frozen=True):
    """The engine takes no new requests and will be gone when those under way have ended."""


class Pong(msgspec.Struct, array_like=True, tag="pong", frozen=True):
    sent_at: float
    """Of the Ping."""
    now: float
    """By the engine's clock."""
    beat: Heartbeat


class LoadedAdapters(msgspec.Struct, array_like=True, tag="adapters", frozen=True):
    """The engine's owner has loaded or unloaded some."""

    keys: list[str]


ClientMessage: TypeAlias = Hello | Ping | Goodbye | AddRequest | AbortRequests | ResetPrefixCache
DoorMessage: TypeAlias = Welcome | Farewell | Leaving | Pong | LoadedAdapters | StepOutputs


def protocol_version(messages: Iterable[type[msgspec.Struct]]) -> int:
    """32 bits: another number for messages that have another field, name or form."""
    forms = [(m.__name__, m.__struct_config__.tag, m.__struct_config__.array_like, m.__annotations__) for m in messages]
    return int.from_bytes(hashlib.sha256(repr((_MEANING, sorted(forms, key=str))).encode()).digest()[:4])


MESSAGES = [
    struct
    for module in (contract_messages, engine_stats, model_info, sys.modules[__name__])
    for struct in vars(module).values()
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and struct.__module__ == module.__name__
]
"""All that cross the door, and what they are made of."""
PROTOCOL_VERSION = protocol_version(MESSAGES)
"""Both sides must have the same."""
