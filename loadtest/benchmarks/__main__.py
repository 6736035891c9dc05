"""`python loadtest/benchmarks COMMAND`, for an environment in which this checkout is installed."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run as a folder: Python looks for modules in it, not beside it
        sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.commands import main

    sys.exit(main())
