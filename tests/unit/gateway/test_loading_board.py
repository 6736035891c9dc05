"""What operators see of models that are being loaded."""

from __future__ import annotations

import io
import logging

import pytest

from penstock.engines.contract.loading import Loading
from penstock.engines.process.loading_reports import LoadingReports
from penstock.gateway.front.loading_board import LoadingBoard, LoadingLog
from penstock.gateway.front.terminal_log import TerminalLog

WEIGHTS = Loading("weights", 120, 290, "tensors")


@pytest.mark.parametrize(
    ("loading", "text"),
    [
        (WEIGHTS, "weights: 120 of 290 tensors"),
        (Loading("compile"), "compile"),
        (Loading("download", 1_500_000, 3_000_000_000, "B"), "download: 1.5 of 3,000.0 MB"),
    ],
)
def test_progress_in_words(loading: Loading, text: str) -> None:
    assert str(loading) == text


def test_a_model_is_on_the_board_from_its_announcement_to_its_end() -> None:
    board = LoadingBoard()
    board.announce(["a", "b"])
    assert ("a" in board, "b" in board, board.text("a")) == (True, True, "")
    report = board.reporter(["a", "b"])
    report(WEIGHTS)
    assert board.texts() == {"a": str(WEIGHTS), "b": str(WEIGHTS)}
    report(None)
    assert ("a" in board, board.text("a"), board.names()) == (False, "", [])


def test_a_model_that_was_not_announced_is_there_with_its_first_report() -> None:
    board = LoadingBoard()
    board.reporter(["a"])(WEIGHTS)
    assert board.names() == ["a"]


class View:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        self.seen.append(name)

    def clear(self) -> None:
        self.seen.append("-")


def test_the_view_is_cleared_when_the_last_model_is_loaded() -> None:
    board = LoadingBoard(view := View())
    a, b = board.reporter(["a", "alias"]), board.reporter(["b"])
    a(WEIGHTS)
    b(WEIGHTS)
    a(None)
    assert view.seen == ["a", "b"]
    b(None)
    assert view.seen == ["a", "b", "-"]


def test_the_log_has_a_line_for_each_stage_and_one_every_few_seconds() -> None:
    lines: list[str] = []
    now = 0.0
    log = LoadingLog(lines.append, lambda: now)
    log.show("m", WEIGHTS, 0.5)
    assert lines == [], "many models are loaded in a moment"
    for now, loading in [(2.0, WEIGHTS), (3.0, WEIGHTS), (7.0, WEIGHTS), (7.1, Loading("compile"))]:
        log.show("m", loading, now)
    assert lines == [f"loading m: {WEIGHTS}"] * 2 + ["loading m: compile"]


def test_a_terminal_has_a_bar_below_its_lines() -> None:
    stream = io.StringIO()
    log = TerminalLog(stream)
    log.show("m", WEIGHTS, 2.0)
    bar = "[#########...............] m: weights: 120 of 290 tensors (2 s)"
    assert stream.getvalue() == f"\r\x1b[K{bar}\r"
    stream.truncate(0)
    stream.seek(0)
    log.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None))
    assert stream.getvalue() == f"\r\x1b[Ka line\n\r\x1b[K{bar}\r"
    stream.truncate(0)
    stream.seek(0)
    log.clear()
    log.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None))
    assert stream.getvalue() == "\r\x1b[Ka line\n"


def test_an_engine_process_does_not_report_each_tensor() -> None:
    sent: list[Loading] = []
    now = 0.0
    reports = LoadingReports(sent.append, lambda: now)
    for number in range(100):
        now = number / 100
        reports(Loading("weights", number, 100, "tensors"))
    reports(Loading("compile"))
    assert len(sent) <= 8
    assert sent[-1] == Loading("compile")
