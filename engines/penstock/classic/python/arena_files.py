"""The anonymous files behind an instance's two arenas."""

from __future__ import annotations

import os


class ArenaFiles:
    """`down`: what the server writes; `up`: what the model's process writes. They have no name in /dev/shm, do not
    count against its size, and end with the last process that maps them."""

    def __init__(self, prefix: str) -> None:
        self.down = os.memfd_create(f"{prefix}-down")
        try:
            self.up = os.memfd_create(f"{prefix}-up")
        except OSError:
            os.close(self.down)
            raise
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.down)
            os.close(self.up)
