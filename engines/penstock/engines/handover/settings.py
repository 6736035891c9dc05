"""Settings of the memory through which engines hand over blocks."""

from __future__ import annotations

import msgspec


class Region(msgspec.Struct, frozen=True):
    """Memory that one engine writes and all read, as two files."""

    contents: str
    index: str


class HandoverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one of several engines with the same model and settings."""

    regions: tuple[Region, ...]
    """The same for all of these engines."""
    region_bytes: int
    """Most bytes of blocks in a region, what is noted with each included."""
    own: int | None
    """Which region this engine writes; None: it only reads."""
    key: bytes
    """32 bytes, for hashes and checksums: secret, and the same for all of these engines."""
