"""What every test may rely on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

# A shell starts what it runs in the background with Ctrl-C ignored, which everything started from here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP. A handler that does nothing is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """The log settings of the protocols really change it, for the whole process."""
    logger = logging.getLogger("penstock")
    level = logger.level
    yield
    logger.setLevel(level)
