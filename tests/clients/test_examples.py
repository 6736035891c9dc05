"""The agents in examples/agents, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.server import Server

AGENTS = Path(__file__).parents[2] / "examples" / "agents"


@pytest.mark.parametrize("name", ["openai_agent.py", "langchain_agent.py"])
def test_agents_call_tools_in_parallel_and_end_with_an_object(server: Server, name: str) -> None:
    if name.startswith("langchain"):
        pytest.importorskip("langchain_openai")
    command = [sys.executable, str(AGENTS / name), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith(("Weather: ", "Distance: ", "Trains: "))]
    assert len(results) > 1, "the calls are parallel"
    assert done.stdout.rstrip().rpartition("\n")[2].startswith("Trip(destination=")
