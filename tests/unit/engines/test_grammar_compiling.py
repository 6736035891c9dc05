"""Requests whose grammars are compiled beside the steps."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from penstock.engines import grammar_compiling
from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import EngineError, InvalidRequestError, OverloadedError, QueueFullError
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from support.engine import Driver

SLOW = "slow"
PROMPT = [5, 6, 7]


class Host(SimulatedRunner):
    """Compiles by waiting at a gate, if the text begins with `SLOW`; an output does not care for its grammar."""

    def __init__(self) -> None:
        super().__init__(SimulatedConfig())
        self.info = msgspec.structs.replace(self.info, supports_grammars=True)
        self.begun: list[str] = []
        self.problems: dict[str, Exception] = {}
        self.worn_out: set[str] = set()
        self.gate = threading.Event()

    def compile_grammar(self, grammar: Grammar) -> Any:
        self.begun.append(grammar.text)
        if grammar.text.startswith(SLOW):
            assert self.gate.wait(20)
        if grammar.text in self.problems:
            raise self.problems[grammar.text]
        return grammar.text

    def is_worn_out(self, compiled: Any) -> bool:
        return compiled in self.worn_out


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.gate.set()


@pytest.fixture
def driver(host: Host) -> Iterator[Driver]:
    made = Driver(host, max_num_seqs=2)
    yield made
    made.core.close()


def ask(driver: Driver, text: str, n: int = 1, **params: Any) -> tuple[int, ...]:
    return driver.add(PROMPT, 4, n, grammar=Grammar("regex", text), **params)


def ended(driver: Driver, *requests: int) -> Callable[[], bool]:
    return lambda: all(request in driver.ends for request in requests)


def test_others_pass_by_who_waits(host: Host, driver: Driver) -> None:
    waiting = ask(driver, SLOW, n=2)
    others = [driver.add(PROMPT, 4)[0] for _ in range(5)] + [*ask(driver, "quick")]
    driver.run(until=ended(driver, *others))
    assert driver.stats.num_waiting == 2
    assert not driver.core.has_work
    host.gate.set()
    driver.run()
    assert set(driver.ends) == {*waiting, *others}
    assert {driver.ends[request].error for request in driver.ends} == {None}


def test_the_runner_gets_what_it_has_compiled(host: Host, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[int, Any] = {}
    submit = host.submit

    def note(step: Any) -> None:
        given.update((new.id, new.grammar) for new in step.new_requests)
        submit(step)

    monkeypatch.setattr(host, "submit", note)
    [plain], [first], [second] = driver.add(PROMPT, 4), ask(driver, "a"), ask(driver, "b")
    driver.run()
    assert given == {plain: None, first: "a", second: "b"}


def test_nothing_is_compiled_for_a_request_that_is_refused(host: Host, driver: Driver) -> None:
    [wrong] = driver.add([10**9], 4, grammar=Grammar("regex", "unwanted"))
    [right] = ask(driver, "wanted")
    driver.run()
    assert driver.ends[wrong].error is not None
    assert driver.ends[right].error is None
    assert host.begun == ["wanted"]


def test_equal_grammars_are_compiled_once(host: Host, driver: Driver) -> None:
    for _ in range(3):
        ask(driver, SLOW, n=2)
    driver.step()
    host.gate.set()
    driver.run()
    ask(driver, SLOW)
    driver.run()
    assert host.begun == [SLOW]
    assert len(driver.ends) == 7


def test_a_grammar_that_is_worn_out_is_compiled_again(host: Host, driver: Driver) -> None:
    ask(driver, "a")
    driver.run()
    host.worn_out.add("a")
    ask(driver, "a")
    driver.run()
    host.worn_out.clear()
    ask(driver, "a")
    driver.run()
    assert host.begun == ["a", "a"]


@pytest.mark.parametrize(
    ("problem", "kind", "told"),
    [
        (InvalidRequestError("no such class"), InvalidRequestError, "no such class"),
        (EngineError("no tokenizer"), EngineError, "no tokenizer"),
        (KeyError("/secret"), EngineError, "The engine failed to compile the grammar."),
    ],
)
def test_who_waits_for_what_does_not_compile_is_told(
    host: Host, driver: Driver, problem: Exception, kind: type[Exception], told: str
) -> None:
    host.problems["bad"] = problem
    [other] = driver.add(PROMPT, 4)
    wrong = [*ask(driver, "bad", n=2), *ask(driver, "bad")]
    driver.run()
    for request in wrong:
        error: Any = driver.ends[request].error
        assert (error.code, error.message) == (kind.code, told)  # type: ignore[attr-defined]
        assert driver.tokens[request] == []
    assert driver.ends[other].error is None
    # Only what would fail again is kept: an engine's own failure may pass.
    again = ask(driver, "bad")
    driver.run()
    assert driver.ends[again[0]].error is not None
    assert len(host.begun) == (1 if kind is InvalidRequestError else 2)


def test_what_takes_too_long_is_given_up(host: Host, driver: Driver) -> None:
    [slow] = ask(driver, SLOW)
    [other] = driver.add(PROMPT, 4)
    driver.run(until=ended(driver, other))
    look = driver.core.next_look
    assert look is not None
    driver.now = look - 0.1
    driver.step()
    assert slow not in driver.ends
    driver.now = look
    driver.step()
    error: Any = driver.ends[slow].error
    assert error.code == OverloadedError.code
    host.gate.set()
    # What comes of it now is nobody's: the loop is woken once, and the next request begins again.
    assert select.select(driver.core.wakeups, [], [], 20)[0]
    driver.step()
    assert not select.select(driver.core.wakeups, [], [], 0)[0], "an engine at idle would step without end"
    [again] = ask(driver, SLOW)
    driver.run()
    assert driver.ends[again].error is None
    assert host.begun == [SLOW, SLOW]


def test_what_has_not_begun_when_it_is_given_up_never_begins(host: Host, driver: Driver) -> None:
    slow = [ask(driver, f"{SLOW} {number}")[0] for number in range(3)]  # for two threads
    driver.step()
    look = driver.core.next_look
    assert look is not None
    driver.now = look
    driver.step()
    assert set(driver.ends) == set(slow)
    host.gate.set()
    ask(driver, "last")
    driver.run()
    assert f"{SLOW} 2" not in host.begun


def test_so_many_grammars_may_wait(host: Host, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiling, "_MAX_PENDING_CHARS", 12_000)  # two, with what each counts for
    waiting = [*ask(driver, SLOW), *ask(driver, f"{SLOW} 2"), *ask(driver, SLOW, n=2)]
    driver.step()
    driver.now += 3
    refused, [other] = ask(driver, "third", n=2), driver.add(PROMPT, 4)
    driver.run(until=ended(driver, *refused, other))
    errors: list[Any] = [driver.ends[request].error for request in refused]
    assert [(error.code, error.retry_after) for error in errors] == [(QueueFullError.code, 3.0)] * 2
    assert driver.ends[other].error is None
    host.gate.set()
    driver.run(until=ended(driver, *waiting))
    again = [*ask(driver, "third"), *ask(driver, "x" * 20_000)]
    driver.run()
    assert driver.ends[again[0]].error is None, "there is room again"
    assert driver.ends[again[1]].error is not None
    alone = ask(driver, "x" * 20_000)
    driver.run()
    assert {driver.ends[request].error for request in (*waiting, *alone)} == {None}
    assert host.begun == [SLOW, f"{SLOW} 2", "third", "x" * 20_000]


def test_requests_that_wait_can_be_aborted(host: Host, driver: Driver) -> None:
    waiting = ask(driver, SLOW, n=3)
    driver.step()
    driver.abort(*waiting[:2])
    driver.step()
    assert set(driver.ends) == {*waiting[:2]}
    host.gate.set()
    driver.run()  # which fails if one of them ends twice
    assert set(driver.ends) == {*waiting}
    assert [driver.tokens[request] != [] for request in waiting] == [False, False, True]


def test_what_everybody_has_left_ends_quietly(host: Host, driver: Driver) -> None:
    host.problems[SLOW] = InvalidRequestError("never told")
    [waiting] = ask(driver, SLOW)
    driver.step()
    driver.abort(waiting)
    driver.step()
    host.gate.set()
    driver.run()
    assert driver.ends[waiting].error is None
    assert driver.stats.num_waiting == 0


def test_the_cache_is_bounded(host: Host, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiling, "_MAX_CACHED_CHARS", 30_000)
    names = ["a" * 4000, "b" * 4000, "c" * 4000]  # with what each entry counts for, three fit
    for text in [*names, names[0], "d" * 4000, names[0], names[1]]:
        ask(driver, text)
        driver.run()
    assert [text[0] for text in host.begun] == ["a", "b", "c", "d", "b"]
    assert driver.core.grammars._cached_chars <= 30_000  # type: ignore[union-attr]


def test_one_that_is_larger_than_the_cache_is_kept_alone(
    host: Host, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiling, "_MAX_CACHED_CHARS", 30_000)
    for text in ("a", "b" * 50_000, "b" * 50_000, "a"):
        ask(driver, text)
        driver.run()
    assert [text[0] for text in host.begun] == ["a", "b", "a"]
