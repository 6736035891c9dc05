"""Fields of the Messages API that ask for what this server does not do, each with the values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping

THREAD = "thread"
"""A conversation that the server keeps."""

UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "compaction": ("null",),
    "container": ("null",),
    "mcp_servers": ("null", "[]"),
    "output_format": ("null",),
    "speed": ("null", '"standard"'),
    THREAD: ("null",),
}
