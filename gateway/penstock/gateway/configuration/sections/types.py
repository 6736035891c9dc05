"""Types that the settings of several sections have."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
ListeningPort = Literal["http", "grpc", "metrics"]
Name = Annotated[str, Meta(min_length=1)]
"""Never empty: `--api-key "$KEY"` without a KEY must not let in clients that send an empty one, or no key at all."""
