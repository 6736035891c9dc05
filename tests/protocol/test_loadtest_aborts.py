"""Clients that leave at random moments, as one command, against a real server."""

from __future__ import annotations

import json

import pytest

from penstock.loadtest.aborts import main
from support.server import serving


def test_a_storm_and_what_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "2", "--num-kv-blocks", "64")
    with serving(*flags) as server:
        # with more at a time, none is complete before it leaves on a busy machine
        where = ("--url", server.url, "--operator", server.operator, "--concurrency", "4")
        assert main([*where, "--model", "m", "--requests", "150"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["clients"].keys() == {"complete", "left"}
        assert sum(told["clients"].values()) == 150
        assert told["admitted"] == sum(told["finished"].values()) > 0
        assert told["leaked_blocks"] == 0
        assert main([*where, "--model", "other"]) == 1
        assert "has no model 'other'" in capsys.readouterr().err
