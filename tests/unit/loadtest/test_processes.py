from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.loadtest import processes
from penstock.loadtest.processes import family, is_local, listeners, usage


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
    assert processes._is_own(ipaddress.ip_address("127.0.0.1"))
    monkeypatch.setattr(processes, "_is_own", lambda address: str(address) == "192.0.2.8")
    assert is_local("http://192.0.2.8:8000")


def process(root: Path, pid: int, parent: int, *, ticks: tuple[int, int] = (0, 0), pages: int = 0) -> Path:
    folder = root / str(pid)
    (folder / "fd").mkdir(parents=True)
    fields = ["S", parent, *["0"] * 9, *ticks, *["0"] * 8, pages, "0"]
    (folder / "stat").write_text(f"{pid} (a name) (with it) {' '.join(map(str, fields))}\n")
    return folder


def test_who_listens(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    line = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"
    (tmp_path / "net" / "tcp").write_text(
        "head\n"
        + line.format(port=8000, state="0A", inode=77)
        + line.format(port=8001, state="0A", inode=78)
        + line.format(port=8000, state="01", inode=79)
    )
    for pid, inode in ((10, 77), (11, 78), (12, 79), (13, 77)):
        (process(tmp_path, pid, 1) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    assert listeners(8000, tmp_path) == {10, 13}
    assert listeners(8002, tmp_path) == set()
    assert listeners(8000, tmp_path / "nowhere") == set()


def test_a_process_and_what_it_has_started(tmp_path: Path) -> None:
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (20, 10), (21, 20), (30, 1)):
        process(tmp_path, pid, parent)
    assert family({10}, root=tmp_path) == {10, 11, 12, 20, 21}
    assert family({10}, without=(20,), root=tmp_path) == {10, 11, 12}
    assert family({10}, without=(10,), root=tmp_path) == set()


def test_what_they_use(tmp_path: Path) -> None:
    process(tmp_path, 5, 1, ticks=(150, 50), pages=10)
    ((pid, used),) = usage({5, 6}, tmp_path).items()
    assert pid == 5
    assert used.cpu_seconds == 200 / os.sysconf("SC_CLK_TCK")
    assert used.rss_bytes == 10 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_very_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners(server.getsockname()[1]) == {os.getpid()}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in family({os.getpid()})
        assert usage({child.pid})[child.pid].rss_bytes > 0
    finally:
        child.communicate(b"\n")
