"""`python -m penstock.gateway.llm.hub_download ID`: a snapshot of a model, and JSON lines of how far it is.

`{"done", "total", "unit"}` a few times a second; the last line is `{"folder"}` or `{"problem"}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, ClassVar

import huggingface_hub
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from tqdm import tqdm

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
_NOT_FILES = ("*/*", "consolidated*")
"""Copies in other layouts, such as Mistral's consolidated.safetensors: all of the weights a second time."""
_INTERVAL = 0.2
_NOWHERE = open(os.devnull, "w")  # noqa: SIM115


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Progress(tqdm):  # type: ignore[misc]
    """Is told what the hub's library would draw: a bar of files, and in newer versions one or two bars of bytes.

    Of two, one counts what has come over the network and the other what has been written. What is said is the further
    one, so that it never goes back; and the smaller total, since the network's is only a guess.
    """

    _news = threading.Lock()
    _of_bytes: ClassVar[list[Progress]] = []
    _next = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **options | {"disable": False, "file": _NOWHERE})
        if self.unit == "B":
            Progress._of_bytes.append(self)

    def update(self, n: float | None = 1) -> None:
        super().update(n)
        with Progress._news:
            now = time.monotonic()
            begun = [bar for bar in Progress._of_bytes if bar.n and bar.total]
            shown = begun or [self]
            total = min(int(bar.total or 0) for bar in shown)
            if total and now >= Progress._next:
                Progress._next = now + _INTERVAL
                done = min(total, max(int(bar.n) for bar in shown))
                _say(done=done, total=total, unit="B" if begun else "files")


Progress.set_lock(threading.RLock())  # tqdm's own is for several processes, and starts one for that


def problem_text(hub_id: str, error: Exception) -> str:
    """One line for the operator. Below the hub's library there are others, each with errors of its own."""
    if isinstance(error, HFValidationError | RepositoryNotFoundError):
        return f"there is no folder and no hub model called {hub_id!r}"
    first = next(iter(str(error).splitlines()), "")
    kind = "" if first and isinstance(error, OSError) else f"{type(error).__name__}: "
    return f"{hub_id} cannot be downloaded: {kind}{first}".removesuffix(": ")


def main() -> None:
    hub_id = sys.argv[1]
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES), tqdm_class=Progress
        )
    except Exception as error:
        _say(problem=problem_text(hub_id, error))
    else:
        _say(folder=str(folder))


if __name__ == "__main__":
    main()
