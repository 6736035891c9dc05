"""`python -m penstock.gateway.llm.hub_download ID`: a snapshot of a model, and JSON lines of how far it is.

`{"done", "total", "unit"}` a few times a second; the last line is `{"folder"}` or `{"problem"}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from tqdm import tqdm

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
_NOT_FILES = ("*/*", "consolidated*")
"""Copies in other layouts, such as Mistral's consolidated.safetensors: all of the weights a second time."""
_INTERVAL = 0.2
_NOWHERE = open(os.devnull, "w")  # noqa: SIM115


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class _Progress(tqdm):  # type: ignore[misc]
    """Is told what the hub's library would draw: a bar of files, and in newer versions bars of bytes."""

    _lock = threading.Lock()
    _counts_bytes = False
    _next = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **options | {"disable": False, "file": _NOWHERE})

    def update(self, n: float | None = 1) -> None:
        super().update(n)
        with _Progress._lock:
            _Progress._counts_bytes |= self.unit == "B"
            now = time.monotonic()
            if self.total and now >= _Progress._next and _Progress._counts_bytes == (self.unit == "B"):
                _Progress._next = now + _INTERVAL
                _say(done=int(self.n), total=int(self.total), unit="B" if self.unit == "B" else "files")


def main() -> None:
    hub_id = sys.argv[1]
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES), tqdm_class=_Progress
        )
    except (HFValidationError, RepositoryNotFoundError):
        _say(problem=f"there is no folder and no hub model called {hub_id!r}")
    except (LocalEntryNotFoundError, OSError) as error:
        _say(problem=f"{hub_id} cannot be downloaded: {str(error).splitlines()[0]}")
    else:
        _say(folder=str(folder))


if __name__ == "__main__":
    main()
