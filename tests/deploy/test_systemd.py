"""The unit, as systemd reads it. That the server speaks to systemd is shown by protocol/test_service_manager.py."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from deploy.places import DEPLOY, program, run

UNIT = DEPLOY / "systemd/penstock.service"
_MOST_EXPOSED = 20
"""Tenths. A service without any of these settings has 9.6; 0 would be nothing at all."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's files as the commands in docs/deploy.md leave them, with programs that do nothing."""
    program("systemd-analyze")
    for name in ("opt/penstock/bin/penstock", "bin/kill"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", tmp_path / name)
    units = tmp_path / "etc/systemd/system"
    (units / "penstock.service.d").mkdir(parents=True)
    shutil.copy(UNIT, units)
    shutil.copytree("/lib/systemd/system", tmp_path / "lib/systemd/system", symlinks=True)
    return tmp_path


def test_systemd_understands_the_unit(root: Path) -> None:
    assert "penstock" not in run(program("systemd-analyze"), "verify", f"--root={root}", "penstock.service")


def test_systemd_understands_the_drop_in(root: Path) -> None:
    shutil.copy(DEPLOY / "systemd/penstock-nvidia.conf", root / "etc/systemd/system/penstock.service.d/nvidia.conf")
    assert "penstock" not in run(program("systemd-analyze"), "verify", f"--root={root}", "penstock.service")


def test_a_mistake_would_be_noticed(root: Path) -> None:
    unit = root / "etc/systemd/system/penstock.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=60", "WatchdogSec=often"))
    assert "penstock.service:" in run(program("systemd-analyze"), "verify", f"--root={root}", "penstock.service")


def test_it_may_do_little(root: Path) -> None:
    report = run(
        program("systemd-analyze"),
        *("security", "--offline=true", f"--root={root}", f"--threshold={_MOST_EXPOSED}", "penstock.service"),
    )
    assert re.search(r"Overall exposure level for penstock.service: \d\.\d OK", report)


def test_its_user_is_one_that_systemd_can_make(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run(program("systemd-sysusers"), f"--root={tmp_path}", DEPLOY / "systemd/penstock.sysusers.conf")
    user = "penstock"
    assert f"\n{user}:" in "\n" + (tmp_path / "etc/passwd").read_text()
    assert f"User={user}\nGroup={user}\n" in UNIT.read_text()
