"""What every test may rely on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """The log settings of the protocols really change it, for the whole process."""
    logger = logging.getLogger("penstock")
    level = logger.level
    yield
    logger.setLevel(level)
