"""A batch: what was asked for, how far it is, and what its clients are shown."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
BATCH_PREFIX, MESSAGE_BATCH_PREFIX = "batch_", "msgbatch_"
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Batch(msgspec.Struct, kw_only=True):
    id: str
    """The prefix of its API and 32 hexadecimal digits."""
    tenant: str
    key: str = ""
    """Which of its keys it was: lines count as that one's."""
    models: tuple[str, ...] | None
    """Those that its tenant's key may use; None: all."""
    endpoint: str
    input_file_id: str
    window_s: float
    """Seconds that it may take: OpenAI's `completion_window`."""
    metadata: dict[str, str] | None = None
    output_lifetime: float | None = None
    """Seconds after which what it has written is deleted."""
    created: float = msgspec.field(default_factory=time.time)
    status: Status = "validating"
    moments: dict[str, float] = {}
    """When it came to each status."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []
    """What is wrong with its input."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    validated: bool = False
    """Its input was read, and there is room for its results."""
    unanswered: int | None = None
    """Lines that had no answer when its files were written; None: that is not known yet."""
    volatile: bool = False
    """It is gone when the server ends."""
    ends_as: Literal["completed", "expired"] = "completed"
    """Decided before its files are written, so that it is the same after a restart."""

    @property
    def is_of_messages(self) -> bool:
        """Of Anthropic's API; the other ones are of OpenAI's."""
        return self.id.startswith(MESSAGE_BATCH_PREFIX)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def expires(self) -> float:
        return self.created + self.window_s

    @property
    def last_change(self) -> float:
        return max(self.moments.values(), default=self.created)

    def enter(self, status: Status) -> None:
        self.status = status
        self.moments[status] = time.time()

    def shown(self) -> dict[str, object]:
        """https://platform.openai.com/docs/api-reference/batch/object"""
        moments = {f"{name}_at": self.moments.get(name) for name in _MOMENTS}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": f"{self.window_s / 3600:g}h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{name: None if moment is None else int(moment) for name, moment in moments.items()},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            **({"volatile": True} if self.volatile else {}),
        }
