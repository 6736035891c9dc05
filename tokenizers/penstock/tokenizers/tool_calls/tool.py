"""What a parser knows of a tool."""

from __future__ import annotations

from typing import Any

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """One that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, as the client wrote it."""
    strict: bool = False
    """Arguments follow the schema in any case."""
