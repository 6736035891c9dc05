"""The agents in examples/agents, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers_server import Server

AGENTS = Path(__file__).parents[2] / "examples" / "agents"


@pytest.mark.parametrize("name", ["openai_agent.py", "langchain_agent.py"])
def test_agents(server: Server, name: str) -> None:
    if name.startswith("langchain"):
        pytest.importorskip("langchain_openai")
    command = [sys.executable, str(AGENTS / name), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert any(f"{tool}: " in done.stdout for tool in ("Temperature", "Distance", "Timetable"))
    assert done.stdout.rstrip().rpartition("\n")[2].startswith("Trip(destination=")
