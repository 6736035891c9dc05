"""The live view: what it shows, how often, and on what."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.live import LiveView
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import LoadOptions, Options, OutputOptions, Target, WorkloadOptions
from penstock.loadtest.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def options(url: str = "http://server", live: bool = True, **workload: int) -> Options:
    return Options(target=Target(url=url), workload=WorkloadOptions(**workload), output=OutputOptions(live=live))


def sample(index: int, tokens: int = 10, error: str = "") -> Sample:
    return Sample(index=index, intended=0, sent=0, arrivals=[0.05], ended=1.0, output_tokens=tokens, error=error)


def test_figures_so_far() -> None:
    progress = Progress(requests=10, seconds=None)
    progress.add([sample(0), sample(1), sample(2, error="timeout"), sample(3, error=INTERRUPTED)], 4, 2.0)
    shown = dict(progress.parts())
    assert shown["done"] == "3 of 10"
    assert shown["in flight"] == "4"
    assert shown["errors"] == "timeout 1"
    assert shown["requests/s"] == "1.00"
    assert shown["output tokens/s"] == "10.0"
    assert shown["TTFT"] == "p50 49.8 ms, p99 49.8 ms"  # within 1 %
    assert progress.share == pytest.approx(0.3)


def test_rates_are_of_the_last_seconds() -> None:
    progress = Progress(None, None)
    for second in range(1, 11):
        progress.add([sample(second)], 1, float(second))
    for second in range(11, 31):
        progress.add([], 1, float(second))
    assert progress.rates == (0.0, 0.0)
    progress.add([sample(40), sample(41)], 1, 31.0)
    requests, tokens = progress.rates
    assert 0.3 <= requests <= 0.4
    assert tokens == pytest.approx(10 * requests)


def test_the_end_is_known_by_requests_or_by_time() -> None:
    progress = Progress(requests=10, seconds=20)
    progress.add([sample(0)], 1, 15.0)
    assert progress.share == pytest.approx(0.75)
    assert Progress(None, None).share is None


def test_the_end_of_a_plain_run_is_known() -> None:
    stream = io.StringIO()
    with LiveView(options(), stream=stream) as view:
        view.update([sample(0)], 1)
    assert "done 1 of 64" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_what_was_shown_is_not_shown_again_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with LiveView(options(requests=100), stream=stream, clock=clock) as view:
        clock.now += 6
        view.update([sample(0)], 1)
    assert len(stream.getvalue().splitlines()) == 1


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    clock, stream = Clock(), io.StringIO()
    with LiveView(options(requests=100), stream=stream, clock=clock) as view:
        for index in range(40):
            clock.now += 0.25
            view.update([sample(index)], 8)
        assert len(stream.getvalue().splitlines()) == 2  # after 5 and 10 seconds
    *_, last = stream.getvalue().splitlines()
    assert "done 40 of 100" in last
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_is_drawn_at_most_four_times_a_second() -> None:
    pytest.importorskip("rich")
    clock, stream = Clock(), Terminal()
    with LiveView(options(), stream=stream, clock=clock) as view:
        for index in range(1000):
            clock.now += 0.002
            view.update([sample(index)], 8)
        assert 6 <= stream.getvalue().count("in flight") <= 8  # of two seconds


def test_a_terminal_is_not_empty_while_the_server_warms_up() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with LiveView(options(), stream=stream):
        assert "getting ready" in stream.getvalue()


def test_texts_of_others_do_not_reach_the_terminal_as_orders() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with LiveView(options(url="[bold red]x[/] \x1b]0;evil\x07"), stream=stream) as view:
        view.update([sample(0, error="grpc_\x1b[2J[red]")], 1)
        view.note("[link=http://evil]y\x1b[2J")
    written = stream.getvalue()
    for order in ("\x1b]0;", "\x1b[2J"):
        assert order not in written
    for words in ("[bold red]x[/]", "[red]", "[link=http://evil]y"):
        assert words in written


def test_without_rich_there_are_lines_and_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.loadtest.terminal", None)
    stream = Terminal()
    with LiveView(options(), stream=stream) as view:
        view.update([sample(0)], 1)
    assert "penstock-server[loadtest]" in stream.getvalue()
    assert "done 1" in stream.getvalue()


def test_a_view_that_is_not_wanted_shows_notes_only() -> None:
    clock, stream = Clock(), Terminal()
    with LiveView(options(live=False), stream=stream, clock=clock) as view:
        clock.now += 100
        view.update([sample(0)], 1)
        view.note("stopping")
    assert stream.getvalue() == "stopping\n"


def test_a_run_that_never_began_shows_nothing() -> None:
    stream = io.StringIO()
    with LiveView(options(), stream=stream):
        pass
    assert stream.getvalue() == ""


def test_the_view_ends_when_the_run_fails() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with pytest.raises(ValueError, match="oh"), LiveView(options(), stream=stream):
        raise ValueError("oh")
    assert stream.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[?25h" in stream.getvalue()  # the cursor is back


def test_repeats_are_one_run_to_the_view() -> None:
    clock, stream = Clock(), io.StringIO()
    chosen = Options(
        target=Target(url="http://server"),
        workload=WorkloadOptions(requests=5),
        load=LoadOptions(repeat=3, duration=2.0),
    )
    with LiveView(chosen, stream=stream, clock=clock) as view:
        view.update([sample(0)], 1)
        view.note("run 2 of 3")
        view.update([sample(1)], 1)
    assert stream.getvalue().splitlines()[0] == "run 2 of 3"
    assert "1.0 s of 6 s  done 2 of 15" in stream.getvalue()
