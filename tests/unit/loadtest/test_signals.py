"""Signals while a load test runs. Each in a process of its own: it is that process's handlers that matter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def whole(program: str) -> str:
    """With a load test that gets SIGINT or SIGTERM in its very last step."""
    head = """
        import asyncio, signal, sys
        from penstock.loadtest.options import options
        from penstock.loadtest.run import LoadTest

        class Ending(LoadTest):
            async def _run(self):
                signal.raise_signal(signal.Signals[sys.argv[1]])

        def made():
            return Ending(options({"url": "http://127.0.0.1:1"}), None)
    """
    return "\n".join((textwrap.dedent(head), textwrap.dedent(program)))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_the_last_step_is_not_lost(name: str) -> None:
    program = """
        test = made()
        asyncio.run(test.run())
        print(test.interrupted)
    """
    done = subprocess.run([sys.executable, "-c", whole(program), name], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_handlers_are_as_they_were() -> None:
    program = """
        signal.signal(signal.SIGTERM, lambda number, frame: print("ours"))
        asyncio.run(made().run())
        signal.raise_signal(signal.SIGTERM)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    done = subprocess.run([sys.executable, "-c", whole(program), "SIGINT"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ours\nTrue\n", "")


def test_cancelled_before_its_first_step_it_is_ended_by_the_user() -> None:
    """What asyncio.run makes of Ctrl-C there."""
    program = """
        class Cancelled(LoadTest):
            async def _run(self):
                raise asyncio.CancelledError

        try:
            Cancelled(options({"url": "http://127.0.0.1:1"}), None).run_here()
        except KeyboardInterrupt:
            print("ended")
    """
    done = subprocess.run([sys.executable, "-c", whole(program)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended\n", "")
