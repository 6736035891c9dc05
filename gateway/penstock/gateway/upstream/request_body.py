"""From the body that a client sends to the one that the other server gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.configuration.upstream_settings import Api
from penstock.gateway.front.bounded_json import decode_checked, decode_json

_OURS = frozenset({"metadata", "priority", "service_tier", "store", "cache_salt"})
"""Fields by which a client speaks to this server: about its storage, its queues, its cache."""
_MAX_CHOICES = 128
_MOST_EXPECTED = 1 << 20
_PROMPT = ("tools", "messages", "prompt")
"""In the order in which templates render them."""
_MOST_PREFIX = 64 << 10
"""Bytes that are hashed: a few milliseconds."""
_MAX_SESSION = 128
BYTES_OF_TOKEN = 4
"""About: for what a request takes off its key's limits until its answer says how much it was."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Read(msgspec.Struct):
    """What this server has to know of a body."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: float | None = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    store: bool | None = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


class UpstreamRequest:
    """A client's body, read once. Fields that this server does not know pass as they are."""

    def __init__(self, body: bytes, api: Api) -> None:
        """Raises InvalidRequestError, UnsupportedError."""
        self._fields = decode_json(body, dict[str, msgspec.Raw])
        read = decode_checked(body, _Read)
        if read.store:
            raise UnsupportedError("store: chats with a model of another server are not kept.", param="store")
        if read.n is not None and not 1 <= read.n <= _MAX_CHOICES:
            raise InvalidRequestError(f"n must be from 1 to {_MAX_CHOICES}.", param="n")
        self.streams = bool(read.stream) and api != "embeddings"
        self.shows_usage = read.stream_options is not None and bool(read.stream_options.include_usage)
        self.choices = int(read.n or 1) * (_prompts(read.prompt) if api == "completions" else 1)
        asked = (read.max_completion_tokens or read.max_tokens or 0) * (read.n or 1)
        names = (read.prompt_cache_key, read.safety_identifier, read.user)
        self.session = next((name for name in names if name and isinstance(name, str)), "")[:_MAX_SESSION]
        """The caller's name for requests that belong together, as this server's own models read it."""
        self.prompt_estimate = len(body) // BYTES_OF_TOKEN
        self.expected_tokens = self.prompt_estimate + round(min(max(0.0, asked), _MOST_EXPECTED))

    def prefix(self) -> Sequence[int]:
        """The parts that prompts begin with, as numbers of `BYTES_OF_TOKEN` bytes each; of a long one the beginning."""
        text = b"".join(bytes(self._fields[name]) for name in _PROMPT if name in self._fields)
        return memoryview(text)[: min(len(text), _MOST_PREFIX) // BYTES_OF_TOKEN * BYTES_OF_TOKEN].cast("I")

    def written(self, model: str) -> bytes:
        """For another server, which calls the model so. A stream is asked for its usage in any case."""
        fields: dict[str, Any] = {name: raw for name, raw in self._fields.items() if name not in _OURS}
        fields["model"] = model
        if not self.streams:  # without a stream they mean nothing, and many servers refuse them
            fields.pop("stream_options", None)
        else:
            given = self._fields.get("stream_options")
            options = None if given is None else msgspec.json.decode(given, type=dict[str, msgspec.Raw] | None)
            fields["stream_options"] = {**(options or {}), "include_usage": True}
        return msgspec.json.encode(fields)

    def renamed(self, model: str) -> bytes:
        """For another model of this server."""
        return msgspec.json.encode({**self._fields, "model": model})


def _prompts(raw: msgspec.Raw) -> int:
    """A text and a list of token ids are one prompt, a list of these is several."""
    if _first_byte(raw) != b"[":
        return 1
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return len(items) if items and _first_byte(items[0]) in (b'"', b"[") else 1


def _first_byte(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])
