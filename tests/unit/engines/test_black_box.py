"""The last steps of a process, as its parent reads them whatever has become of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.contract.step_ring import NUM_STEPS, StepRing, StepRow, read_steps
from penstock.engines.core import EngineCore
from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.memory import memory_events
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner

counts = st.integers(-1, 2**62)
seconds = st.floats(1e-9, 1e9)


class RingAgainstAList(RuleBasedStateMachine):
    """A ring holds the newest steps of a list that holds all."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(1 << 16)
        self.ring = StepRing(self.memory)
        self.rows: list[StepRow] = []
        self.under_way: list[int] = []

    @rule(now=seconds, numbers=st.tuples(counts, counts, counts, counts, counts), times=st.sampled_from([1, 1, 1, 200]))
    def begin(self, now: float, numbers: tuple[int, int, int, int, int], times: int) -> None:
        for _ in range(times):
            self.ring.begins(now, *numbers)
            self.under_way.append(len(self.rows))
            self.rows.append(StepRow(len(self.rows) + 1, now, 0.0, *numbers))
            if len(self.under_way) > 2:  # as many as an engine has
                self._end(now)

    @precondition(lambda self: self.under_way)
    @rule(took=seconds)
    def end(self, took: float) -> None:
        self._end(took)

    def _end(self, took: float) -> None:
        self.ring.ends(took)
        first = self.under_way.pop(0)
        self.rows[first] = self.rows[first]._replace(seconds=took)

    @rule()
    def fail(self) -> None:
        self.ring.fails()
        for index in self.under_way:
            self.rows[index] = self.rows[index]._replace(seconds=-1.0)
        self.under_way.clear()

    @invariant()
    def the_newest_are_there(self) -> None:
        assert read_steps(bytes(self.memory)) == self.rows[-NUM_STEPS:]


TestRing = RingAgainstAList.TestCase


def test_a_core_writes_down_its_steps() -> None:
    clock = iter(range(10**6)).__next__
    core = EngineCore(SimulatedRunner(SimulatedConfig(num_blocks=64)), SchedulerConfig(), lambda: float(clock()))
    memory = bytearray(1 << 16)
    core.ring = StepRing(memory)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    messages = [AddRequest((number,), [1, 2, 3], params, arrival_time=0.0) for number in (1, 2)]
    while messages or core.has_work:
        core.step(messages)
        messages = []
    rows = read_steps(bytes(memory))
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert (rows[0].num_requests, rows[0].num_tokens, rows[0].num_running) == (2, 6, 2)
    assert rows[0].num_free_blocks < 64
    assert all(row.seconds > 0 for row in rows)
    core.close()


CHILD = """
import os, signal, sys, ctypes, threading
from penstock.engines.host.black_box import record_into

def the_guilty_one():
    {crash}

ring = record_into(int(sys.argv[1]))
ring.begins(5.0, 1, 2, 3, 4, 5)
the_guilty_one()
"""


@pytest.mark.parametrize(
    ("crash", "status", "stack"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("ctypes.string_at(0)", -signal.SIGSEGV, "the_guilty_one"),
        ("os.abort()", -signal.SIGABRT, "the_guilty_one"),
        ("os.kill(os.getpid(), signal.SIGBUS)", -signal.SIGBUS, "the_guilty_one"),
        ("os.kill(os.getpid(), signal.SIGUSR2); os._exit(0)", 0, "the_guilty_one"),
    ],
)
def test_it_survives_any_end_of_the_child(crash: str, status: int, stack: str) -> None:
    box = BlackBox()
    command = [sys.executable, "-c", CHILD.format(crash=crash), str(box.descriptor)]
    done = subprocess.run(command, pass_fds=[box.descriptor], capture_output=True, timeout=100, check=False)
    assert done.returncode == status
    assert box.steps() == [StepRow(1, 5.0, 0.0, 1, 2, 3, 4, 5)]
    assert stack in box.stacks()
    assert bool(stack) == bool(box.stacks())
    box.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(box.descriptor)


@pytest.mark.parametrize(
    ("files", "events"),
    [
        (
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "max 7\noom_kill 2\n"},
            {"max": 7, "oom_kill": 2},
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 3\n",
                "sys/fs/cgroup/memory/a/memory.failcnt": "12\n",
            },
            {"oom_kill": 3, "failcnt": 12},
        ),
        (
            {"proc/vmstat": "nr_free 1\noom_kill 5\n", "proc/self/cgroup": "0::/nowhere\n", "sys/fs/cgroup/x": ""},
            {"machine_oom_kill": 5},
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "garbage\n"}, {}),
        ({}, {}),
    ],
)
def test_counters_of_memory(tmp_path: Path, files: dict[str, str], events: dict[str, int]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_events(tmp_path) == events
