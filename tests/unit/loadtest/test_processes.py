from __future__ import annotations

import ipaddress
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.loadtest import environment
from penstock.loadtest.environment import busy_cpu_seconds, family, is_local, listeners, machine_cores, usage


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost", True),
        ("https://[::1]:8000/v1", True),
        ("127.0.0.53:8001", True),
        ("http://192.0.2.7:8000", False),
        ("http://127.0.0.1.example.com", False),
        ("http://0.0.0.0", False),
    ],
)
def test_what_is_on_this_machine(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_other_addresses_and_the_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Here")
    assert is_local("http://here:8000")
    assert not is_local("http://there:8000")
    assert environment._is_own(ipaddress.ip_address("127.0.0.1"))
    monkeypatch.setattr(environment, "_is_own", lambda address: str(address) == "192.0.2.8")
    assert is_local("http://192.0.2.8:8000")


CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); print('up', flush=True); input()"
"""Starts one, too. Both end when their standard input does."""


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process.pid
    process.communicate()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_who_listens(address: str) -> None:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=kind)
    except OSError:
        pytest.skip(f"this machine has no address {address}")
    with server:
        port = server.getsockname()[1]
        with socket.create_connection((address, port)):
            assert listeners(port) == {os.getpid()}
    assert listeners(port) == set(), "a connection that is left is no listener"


def test_a_process_and_what_it_has_started(child: int) -> None:
    tree = family({child})
    [grandchild] = tree - {child}
    assert family({os.getpid()}) >= {os.getpid(), child, grandchild}
    assert family({os.getpid()}, without=(child,)).isdisjoint(tree)
    assert family({child}, without=(grandchild,)) == {child}
    assert family({child}, without=(child,)) == set()
    assert family({child}, without=(os.getpid(),)) == tree, "a server that this process has started"
    assert family({os.getpid(), grandchild}, without=(child,)) >= {os.getpid(), grandchild}


def test_what_they_use(child: int) -> None:
    used = usage({os.getpid(), child})
    own = resource.getrusage(resource.RUSAGE_SELF)
    assert used[os.getpid()].cpu_seconds == pytest.approx(own.ru_utime + own.ru_stime, abs=0.1)
    assert used[child].rss_bytes > 1e6


def test_what_has_ended_is_left_out() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert usage({process.pid}) == {}
    assert family({process.pid}) == set()


def test_what_the_machine_has_used() -> None:
    """At least what this process has, at most what all cores together could."""
    began, own = time.monotonic(), time.process_time()
    before = busy_cpu_seconds()
    while time.process_time() - own < 0.2:
        pass
    grown = busy_cpu_seconds() - before
    assert 0.1 < grown < (time.monotonic() - began) * machine_cores() + 0.1
