"""Regions of shared memory in a front."""

from __future__ import annotations

import os

import pytest

from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.processes.model_host.host_link import FrontRegions
from penstock.gateway.processes.model_host.messages import RegionFields


def test_the_name_of_a_region_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    region = RegionFields("r\n2026-11-28 ERROR forged", "/gone", 0, 1, "tenant", 0, 0, 0)
    FrontRegions(SharedMemoryRegions(allowed=True), os.getpid()).publish([region])
    [told] = caplog.messages
    assert "cannot be opened" in told
    assert "\n" not in told
