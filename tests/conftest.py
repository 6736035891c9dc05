"""What every test may rely on."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

with suppress(ImportError):  # not all environments of .ci/ have it
    from hypothesis import settings

    # a machine that is busy is no failure
    settings.register_profile("penstock", deadline=None)
    settings.load_profile("penstock")

# A shell starts what it runs in the background with Ctrl-C ignored, which everything started from here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP. A handler that does nothing is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


class _HangWatch:
    """Shows the stacks of all threads and ends the process where the timeout of a test does not come through, as in
    native code: one to three minutes later. pytest's own `faulthandler_timeout` has a thread for each test, and waits
    for the end of that thread; this one has a new thread every two minutes."""

    def __init__(self, limit: float) -> None:
        """`limit`: the timeout of a test that has no other, in seconds."""
        self._limit = limit
        self._stderr = os.dup(2)  # what a test writes there is caught
        self._end = 0.0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        limit = self._limit if marker is None else float(marker.args[0])
        if self._end < time.monotonic() + limit + 60:
            self._end = time.monotonic() + limit + 180
            faulthandler.dump_traceback_later(limit + 180, file=self._stderr, exit=True)

    def pytest_enter_pdb(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._end = math.inf


def pytest_configure(config: pytest.Config) -> None:
    """Bytecode is kept, as by an installation, even where PYTHONDONTWRITEBYTECODE is set: each of the hundreds of
    processes that tests start would spend seconds on it."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if config.pluginmanager.hasplugin("timeout"):
        option = config.getoption("timeout")
        if limit := float(config.getini("timeout") if option is None else option):
            config.pluginmanager.register(_HangWatch(limit))
    gc.disable()  # until all tests are collected: what they import stays
    config.option.loadscopereorder = False  # pytest-xdist would put files with few tests, which may be long, last


WAITING = ("differential", "exchanges", "flow", "protocol")
"""Folders whose tests wait for processes most of the time. Those of the others compute."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Families that differ in little from others are for EVERY_FAMILY=1; EVERY_FAMILY=rest is for nothing else. To skip
    tests takes longer than to leave them out. Where several processes share the files, some wait while others compute,
    to the end."""
    every = os.environ.get("EVERY_FAMILY")
    if every != "1":
        wanted = every == "rest"
        left_out = {item for item in items if _is_like_others(item) is not wanted}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if not hasattr(config, "workerinput"):
        return
    here = Path(__file__).parent
    files = {item.path: item.path.relative_to(here).parts[0] in WAITING for item in items}
    places: dict[Path, float] = {}
    for kind in (True, False):
        alike = [path for path, waits in files.items() if waits is kind]
        places |= {path: number / len(alike) for number, path in enumerate(alike)}
    items.sort(key=lambda item: places[item.path])


def _is_like_others(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("families")
    if marker is None or not isinstance(item, pytest.Function):
        return False
    return not any(isinstance(value, str) and value in marker.args for value in item.callspec.params.values())


def pytest_collection_finish() -> None:
    """Thousands of tests and the modules that they import stay: no collection looks at them. It would take a second
    each time, and engines that are closed ask for one."""
    gc.enable()
    gc.freeze()


class _Stack(ctypes.Structure):
    """`stack_t` of Linux: where a thread's signal handlers run."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_SIGNAL_STACK = ctypes.create_string_buffer(1 << 18)
_sigaltstack = getattr(ctypes.CDLL(None), "sigaltstack", None)


def _signals_have_a_stack() -> None:
    """OpenVINO's plugin for CPUs sets the signal stack of the thread that loads it, and frees it in the one that drops
    it (2026.4): where these differ, the next signal of the first, which may be the timeout of a test, ends the process
    without a word."""
    if _sigaltstack is not None:
        own = _Stack(ctypes.addressof(_SIGNAL_STACK), 0, len(_SIGNAL_STACK))
        _sigaltstack(ctypes.byref(own), None)


def pytest_runtest_setup() -> None:
    _signals_have_a_stack()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    _signals_have_a_stack()


@pytest.fixture(autouse=True, scope="session")
def _certificates_are_read_once() -> Iterator[None]:
    """Not by each of the thousands of clients that tests make: it takes them longer than a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_busy_machine_is_no_failure() -> Iterator[None]:
    """httpx waits five seconds for an answer unless it is told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
        yield


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """The log settings of the protocols really change it, for the whole process."""
    logger = logging.getLogger("penstock")
    level = logger.level
    yield
    logger.setLevel(level)
