"""Download of a model: `python -m penstock.gateway.models.language.hub_download ID [REVISION]` writes JSON lines.

`{"done", "total", "unit"}` a few times a second; the last line is `{"folder"}` or `{"problem"}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, ClassVar

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from tqdm import tqdm

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
_NOT_FILES = ("[!0-9a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*")
"""Copies in other layouts, such as Mistral's consolidated.safetensors: all of the weights a second time.
Folders like 1_Pooling have modules of sentence-transformers, and additional_chat_templates has templates by name."""
_INTERVAL = 0.2
_NOWHERE = open(os.devnull, "w")  # noqa: SIM115


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Progress(tqdm):  # type: ignore[misc]
    """A bar that the hub's library would draw: one of files, and in newer versions one or two of bytes."""

    bars: ClassVar[list[Progress]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **options | {"disable": False, "file": _NOWHERE})
        Progress.bars.append(self)


Progress.set_lock(threading.RLock())  # tqdm's own is for several processes, and starts one for that


def progress() -> dict[str, object] | None:
    """What all bars together say; None: nothing yet.

    Of two bars of bytes, one counts what has come over the network and the other what has been written. The further one
    is said, so that it never goes back; and the smaller total, since the network's is only a guess.
    """
    known = [bar for bar in Progress.bars if bar.total]
    of_bytes = [bar for bar in known if bar.unit == "B"]
    shown = of_bytes or known
    if not shown:
        return None
    total = min(int(bar.total) for bar in shown)
    return {
        "done": min(total, max(int(bar.n) for bar in shown)),
        "total": total,
        "unit": "B" if of_bytes else "files",
    }


def _tell(ended: threading.Event) -> None:
    """A few times a second what is new. In a thread, so that the newest is said also when nothing follows for long."""
    last = None
    while not ended.wait(_INTERVAL):
        news = progress()
        if news is not None and news != last:
            last = news
            _say(**news)


def problem_text(hub_id: str, error: Exception) -> str:
    """One line for the operator. Below the hub's library there are others, each with errors of its own."""
    if isinstance(error, RevisionNotFoundError):
        return f"{hub_id} has no such revision"
    if isinstance(error, GatedRepoError):
        return f"{hub_id} is for those who have accepted its terms on the hub: set HF_TOKEN to a token of theirs"
    alone = "" if "/" in hub_id else " (ORG/NAME)"
    if isinstance(error, HFValidationError | RepositoryNotFoundError):
        return f"{hub_id} is neither a folder or file here nor a model of the hub{alone}"
    first = next(iter(str(error).splitlines()), "")
    kind = "" if first and isinstance(error, OSError) else f"{type(error).__name__}: "
    here = f" is neither a folder or file here nor a model of the hub{alone}: it" if alone else ""
    return f"{hub_id}{here} cannot be downloaded: {kind}{first}".removesuffix(": ")


def main() -> None:
    hub_id, *revision = sys.argv[1:]
    ended = threading.Event()
    telling = threading.Thread(target=_tell, args=(ended,), daemon=True)
    telling.start()
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=next(iter(revision), None),
            allow_patterns=list(_FILES),
            ignore_patterns=list(_NOT_FILES),
            tqdm_class=Progress,
        )
        result = {"folder": str(folder)}
    except Exception as error:
        result = {"problem": problem_text(hub_id, error)}
    ended.set()
    telling.join()
    _say(**result)


if __name__ == "__main__":
    main()
