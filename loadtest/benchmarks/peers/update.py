"""Tables within documents: what stands between two marks is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmarks.peers.results import PeersReport
from benchmarks.peers.short_table import short_table
from benchmarks.peers.tables import section
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.report.write import put

FORMS = {"short": short_table, "tables": section}
"""By the word in the mark. `short` is one table."""
_MARKS = re.compile(
    rf"(?P<begin><!-- peers: (?P<form>{'|'.join(FORMS)}) -->\n).*?(?P<end><!-- /peers -->)", flags=re.DOTALL
)


def check(path: str) -> None:
    """Raises LoadTestError for a document that could not be updated after the measurement."""
    if not _MARKS.search(_read(path)):
        raise LoadTestError(
            f"{path}: has no marks: <!-- peers: short --> or <!-- peers: tables -->, and <!-- /peers --> after it"
        )
    if not os.access(path, os.W_OK):
        raise LoadTestError(f"{path}: cannot be written")


def update(path: str, report: PeersReport) -> str:
    """Says what went wrong, or nothing."""
    text = _MARKS.sub(lambda match: f"{match['begin']}\n{FORMS[match['form']](report)}\n\n{match['end']}", _read(path))
    return put(path, text)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: cannot be read: {error}") from None
