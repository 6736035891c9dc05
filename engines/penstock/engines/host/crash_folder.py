"""The folder with what is known of processes that died: an engine's, a Python model's, a front's.

Each has a folder of its own with `report.json`, `steps.csv` and `stacks.txt`, for the user of the server alone. Nothing
waits until they are written, and where they cannot be, the log says so once for each.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from penstock.engines.contract.step_ring import StepRow
from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.machine_facts import machine, variables, versions
from penstock.engines.host.memory import memory_events
from penstock.engines.host.redaction import Redaction

logger = logging.getLogger(__name__)

FILES = ("report.json", "steps.csv", "stacks.txt")
"""Of each."""
SCHEMA = "penstock-crash/1"
"""Of `report.json`."""
MOST_KEPT = 10
"""Crashes: the newest."""
_FORM = re.compile(r"\d{8}-\d{6}-(?:engine|model|front)-.+")
"""Names of their folders; others are not touched. They sort by time."""
_PARTIAL = ".crash-"
"""How the folders of those begin that are being written."""
_writers = threading.BoundedSemaphore(4)
"""A disk that hangs holds up so many threads, and no more."""


@dataclass(frozen=True)
class Crash:
    """The end of a process that nobody has asked to end."""

    kind: Literal["engine", "model", "front"]
    name: str
    """The model's, the instance's, or the front's number."""
    pid: int
    status: int | None
    """As subprocess has it, negative after a signal; None: it still ran and was killed then."""
    reason: str
    """As the log tells it."""
    settings: Mapping[str, Any]
    """With their secrets."""


def signal_name(status: int | None) -> str:
    """`SIGSEGV`, of an exit status; "" when it was no signal."""
    if status is None or status >= 0:
        return ""
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def keep_evidence(folder: Path | None, crash: Crash, box: BlackBox) -> threading.Thread | None:
    """Writes in a thread, which is returned, what is known of a crash; `box` may be closed then. None, and nothing is
    written: there is no folder, or it is too slow."""
    if folder is None or not _writers.acquire(blocking=False):
        return None
    try:
        facts = (box.steps(), box.stacks(), _risen(box.memory_events))
        thread = threading.Thread(
            target=_write_safely, args=(folder, crash, *facts), name="crash evidence", daemon=True
        )
        thread.start()
    except (OSError, RuntimeError) as error:  # RuntimeError: there can be no thread
        _writers.release()
        logger.warning("no crash report of %s %s could be written: %s", crash.kind, crash.name, error)
        return None
    return thread


def _risen(before: Mapping[str, int]) -> dict[str, Any]:
    after = memory_events()
    risen = {name: number - before.get(name, 0) for name, number in after.items() if number != before.get(name, 0)}
    return {"before": dict(before), "after": after, "risen": risen}


def _write_safely(folder: Path, crash: Crash, steps: Sequence[StepRow], stacks: str, memory: Mapping[str, Any]) -> None:
    try:
        place = _write(folder, crash, steps, stacks, memory)
        killed = memory["risen"].get("oom_kill") or memory["risen"].get("machine_oom_kill")
        hint = "; memory ran out" if killed and crash.status == -signal.SIGKILL else ""
        logger.error("crash report of %s %s: %s%s", crash.kind, crash.name, place, hint)
    except Exception as error:  # whatever it is, the process has been replaced meanwhile
        logger.warning("no crash report of %s %s could be written: %s", crash.kind, crash.name, error)
    finally:
        _writers.release()


def _write(folder: Path, crash: Crash, steps: Sequence[StepRow], stacks: str, memory: Mapping[str, Any]) -> Path:
    """Raises OSError."""
    now = datetime.now(UTC)
    report = {
        "schema": SCHEMA,
        "kind": crash.kind,
        "name": crash.name,
        "pid": crash.pid,
        "time": now.isoformat(timespec="seconds"),
        "monotonic": time.monotonic(),  # what the steps' times are of
        "reason": crash.reason,
        "status": crash.status,
        "signal": signal_name(crash.status),
        "memory_events": memory,
        "settings": crash.settings,
        "variables": variables(),
        "versions": versions(),
        "machine": machine(),
    }
    shown = Redaction().tree(report)
    files = {
        "report.json": json.dumps(shown, indent=1, ensure_ascii=False, default=str) + "\n",
        "steps.csv": _table(steps),
        "stacks.txt": stacks,
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", crash.name)[:60]
    place = folder / f"{now:%Y%m%d-%H%M%S}-{crash.kind}-{label}-{crash.pid}"
    try:
        for name, text in files.items():
            with open(os.open(partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        partial.rename(place)
    except BaseException:
        _remove(partial)
        raise
    _drop_old(folder)
    return place


def _table(steps: Sequence[StepRow]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(StepRow._fields)
    rows.writerows(
        step._replace(scheduled_at=round(step.scheduled_at, 6), seconds=round(step.seconds, 6)) for step in steps
    )
    return text.getvalue()


def crashes(folder: Path) -> list[Path]:
    """Those that are kept, the newest first. Raises OSError."""
    return sorted((path for path in folder.iterdir() if _FORM.fullmatch(path.name)), reverse=True)


def _drop_old(folder: Path) -> None:
    for path in crashes(folder)[MOST_KEPT:]:
        _remove(path)


def _remove(place: Path) -> None:
    """Files first: nothing but what was written here is deleted."""
    for name in FILES:
        with suppress(OSError):
            (place / name).unlink()
    with suppress(OSError):
        place.rmdir()
