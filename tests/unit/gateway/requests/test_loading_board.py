"""What operators see of models that are being loaded."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable

import pytest

from penstock.engines.contract.loading import Loading
from penstock.engines.host.terminal import line_end
from penstock.engines.process.worker import LoadingReports
from penstock.gateway.requests.loading_board import LoadingBoard, LoadingLog
from penstock.gateway.requests.server_log import TerminalLog

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


class Timer:
    """Stands for the event loop's."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def fire(self) -> None:
        due, self.calls = self.calls, []
        for call in due:
            call()


def test_a_stage_that_reports_once_is_shown_again_until_its_model_is_loaded() -> None:
    timer = Timer()
    board = LoadingBoard(view := View(), timer.later)
    a, b = board.reporter(["a", "alias"]), board.reporter(["b"])
    a(Loading("compile"))
    b(Loading("compile"))
    timer.fire()
    assert view.seen == ["a", "b", "a", "b"]
    a(None)
    timer.fire()
    assert view.seen == ["a", "b", "a", "b", "b"]
    b(None)
    timer.fire()
    assert view.seen == ["a", "b", "a", "b", "b", "-"]
    assert timer.calls == []
    b(Loading("compile"))
    assert len(timer.calls) == 1, "a restart is shown, too"


def test_the_view_is_cleared_when_the_last_model_is_loaded() -> None:
    board = LoadingBoard(view := View(), Timer().later)
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
    further = Loading("weights", 200, 290, "tensors")
    for now, loading in [(2.0, WEIGHTS), (3.0, further), (7.0, further), (7.1, Loading("compile"))]:
        log.show("m", loading, now)
    assert lines == [f"loading m: {WEIGHTS}", f"loading m: {further}", "loading m: compile"]


def test_the_log_repeats_what_stands_still_only_now_and_then() -> None:
    lines: list[str] = []
    now = 0.0
    log = LoadingLog(lines.append, lambda: now)
    for second in range(1, 41):
        now = float(second)
        log.show("m", Loading("vLLM"), now)
    assert lines == ["loading m: vLLM"] * 2


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


def test_whatever_writes_to_the_terminal_holds_the_lock_of_the_log() -> None:
    held: list[bool] = []

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            # asked from another thread, which gets the lock only if this one does not hold it
            asking = threading.Thread(target=lambda: held.append(not log.lock.acquire(blocking=False)))  # type: ignore
            asking.start()
            asking.join()
            return super().write(text)

    log = TerminalLog(Watched())
    log.show("m", WEIGHTS, 2.0)
    log.handle(logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None))
    log.clear()
    assert len(held) >= 4
    assert all(held)


def test_a_line_of_another_writer_erases_the_rest_of_a_longer_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert line_end(Terminal()) == "\x1b[K\n"
    assert line_end(io.StringIO()) == "\n"


def test_an_engine_process_tells_the_end_of_a_stage() -> None:
    sent: list[Loading] = []
    reports = LoadingReports(sent.append, lambda: 0.0)
    for number in range(1, 4):
        reports(Loading("weights", number, 3, "tensors"))
    assert [loading.done for loading in sent] == [1, 3]


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
