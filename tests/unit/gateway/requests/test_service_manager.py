"""What a service manager hears, on a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines.contract.loading import Loading
from penstock.gateway.requests.loading_board import LoadingLog
from penstock.gateway.requests.service_manager import ServiceManager


class Listener:
    """The manager's side."""

    def __init__(self, address: str | bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        """The lines of each message since the last call."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    listener = Listener(address)
    yield listener
    listener.close()


def test_a_server_without_a_manager_says_nothing() -> None:
    environ = {"HOME": "/"}
    manager = ServiceManager.from_environment(environ)
    assert not manager.listens
    manager.ready("ready")
    view = LoadingLog(print)
    assert manager.watching(view) is view


@pytest.mark.parametrize("address", ["vsock:2:1234", "notify"])
def test_other_addresses_are_not_used(address: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not ServiceManager.from_environment({"NOTIFY_SOCKET": address}).listens
    assert address in caplog.text


def test_the_variables_are_not_passed_on(address: str) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    assert ServiceManager.from_environment(environ).listens
    assert environ == {"HOME": "/"}


def test_a_name_in_the_abstract_namespace() -> None:
    name = f"penstock-test-{os.getpid()}"
    listener = Listener(f"\0{name}")
    ServiceManager(f"@{name}").ready("ready")
    assert listener.heard() == [["READY=1", "STATUS=ready"]]
    listener.close()


def test_a_life(address: str, listener: Listener) -> None:
    manager = ServiceManager(address)
    view = manager.watching(LoadingLog(lambda line: None))
    view.show("m", Loading("weights", 0.5), 1.0)
    [[status]] = listener.heard()
    assert status.startswith("STATUS=loading m: weights")
    manager.ready("ready")
    with manager.reloading():
        pass
    [ready, begin, end] = listener.heard()
    assert ready == ["READY=1", "STATUS=ready"]
    assert begin[0] == "RELOADING=1"
    assert begin[1].startswith("MONOTONIC_USEC=")
    assert end == ready
    view.show("another", Loading("weights"), 1.0)
    view.clear()
    assert listener.heard()[-1] == ["STATUS=ready"]
    manager.stopping("draining 2 requests", 40.0)
    assert listener.heard() == [["STOPPING=1", "STATUS=draining 2 requests", "EXTEND_TIMEOUT_USEC=40000000"]]


def test_a_reload_does_not_make_a_server_ready(address: str, listener: Listener) -> None:
    manager = ServiceManager(address)
    with manager.reloading():
        pass
    manager.ready("ready")
    manager.stopping("draining", 1.0)
    with manager.reloading():
        pass
    assert [lines[0] for lines in listener.heard()] == ["READY=1", "STOPPING=1"]


def test_a_reload_that_fails_ends(address: str, listener: Listener) -> None:
    manager = ServiceManager(address)
    manager.ready("ready")
    with pytest.raises(OSError), manager.reloading():
        raise OSError
    assert listener.heard()[-1][0] == "READY=1"


async def test_signs_of_life_until_no_model_can_answer(address: str, listener: Listener) -> None:
    manager = ServiceManager(address, watchdog_seconds=0.02)
    live = [True, True, False]
    done = asyncio.Event()

    def next_answer() -> bool:
        if len(live) == 1:
            done.set()
        return live.pop(0) if len(live) > 1 else live[0]

    manager.start_watchdog(next_answer)
    await done.wait()
    manager.close()
    assert [lines[0] for lines in listener.heard()] == ["WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=trigger"]


def test_a_manager_without_a_watchdog_gets_no_signs(address: str, listener: Listener) -> None:
    ServiceManager(address).start_watchdog(lambda: True)
    assert listener.heard() == []


def test_a_watchdog_of_another_process_is_not_ours(address: str) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    manager = ServiceManager.from_environment(environ)
    manager.start_watchdog(lambda: True)  # would need an event loop


def test_a_manager_that_has_gone_is_no_harm(address: str, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager(address).ready("ready")
    assert "READY=1" in caplog.text
