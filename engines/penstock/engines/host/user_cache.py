"""Where what can be made again is kept between starts."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(part: str) -> Path:
    """The folder for `part`, which may not be there yet: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / part
