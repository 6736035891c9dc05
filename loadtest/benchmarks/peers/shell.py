"""Commands that set things up; what they say goes to a log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.loadtest.errors import LoadTestError

_LINES = 12
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Nothing is fetched and nothing told while peers run: models are local."""


class SetupError(LoadTestError):
    """A peer cannot be set up here."""


def run(argv: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, hint: str = "") -> None:
    """Appends to `log`. Raises SetupError with its last lines, and with the hint, when the command fails."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(map(str, argv))}\n".encode())
        file.flush()
        try:
            done = subprocess.run(
                [*map(str, argv)], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | dict(env or {})
            )
        except OSError as error:
            raise SetupError(f"{argv[0]}: {error.strerror}{hint}") from None
    if done.returncode:
        raise SetupError(f"{Path(argv[0]).name} failed with {done.returncode}{hint}\n  log: {log}\n{tail(log)}")


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(f"  {line}" for line in lines[-_LINES:])
