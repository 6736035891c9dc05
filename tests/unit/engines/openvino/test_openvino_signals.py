"""The signal stack that OpenVINO's plugin for CPUs leaves behind, which tests/conftest.py replaces: of two tests."""

from __future__ import annotations

import signal
from threading import Thread

import openvino as ov
import pytest


def test_a_plugin_ends_in_another_thread_than_it_began_in() -> None:
    cores = [ov.Core()]
    assert cores[0].get_property("CPU", "FULL_DEVICE_NAME")
    dropping = Thread(target=cores.clear)
    dropping.start()
    dropping.join()


def test_the_next_signal_does_not_end_the_process() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
