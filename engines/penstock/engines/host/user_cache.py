"""The user's cache folder, for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

_NO_HOME = "/nonexistent"
"""What Debian calls the home folder of users who have none."""


def user_cache(part: str) -> Path:
    """The folder for `part`, which may not be there yet: below XDG_CACHE_HOME, or ~/.cache. A user that the system does
    not know, as a container's may be, and who has no HOME, gets one that cannot be made."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    return Path(cache_home or Path(home if os.path.isabs(home) else _NO_HOME, ".cache")) / "penstock" / part
