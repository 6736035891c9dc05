"""How commands end before they have begun."""

from __future__ import annotations

import argparse

import pytest

from penstock.loadtest import commands
from penstock.loadtest.errors import LoadTestError


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "penstock x: stopped\n"),
        (LoadTestError("no"), 1, "penstock x: no\n"),
        (LoadTestError("it said \x1b[2J\n"), 1, "penstock x: it said  [2J\n"),
    ],
)
def test_errors_and_ctrl_c_are_one_line_and_a_status(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imported(name: str) -> object:
        raise error

    monkeypatch.setattr(commands, "import_module", imported)
    parser = argparse.ArgumentParser(prog="penstock x")
    assert commands.run_module(parser, "anything", {}) == status
    assert capsys.readouterr().err == said
