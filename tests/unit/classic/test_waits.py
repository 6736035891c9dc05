"""Which requests between models would wait for ever: compared with what happens when everything else goes well."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.batching.waits import Execution, Places, is_stuck


def test_a_model_that_asks_itself() -> None:
    one, two = Places(1), Places(2)
    assert not Execution(one).wait("r", one)
    first, second = Execution(two), Execution(two)
    assert first.wait("r", two)
    assert not second.wait("s", two)
    first.leave("r")
    assert second.wait("s", two)


def test_two_models_that_ask_each_other() -> None:
    a, b = Places(1), Places(1)
    in_a, in_b = Execution(a), Execution(b)
    assert in_a.wait("r", b)
    assert not in_b.wait("s", a)
    in_a.end()
    assert in_b.wait("s", a)


def test_a_request_that_came_back_to_the_model_that_made_it() -> None:
    a, b = Places(1), Places(1)
    in_a, in_b = Execution(a), Execution(b)
    assert in_a.wait("r", b)
    in_a.begin("r", in_b)
    assert not in_b.wait("s", a)
    in_a.leave("r")
    assert in_b.wait("s", a)


Plan = list[tuple[int, set[int], set[int]]]
"""Of each execution: its model, the models in whose queues it waits, and the executions that it waits for."""


@given(st.lists(st.integers(1, 2), min_size=1, max_size=4), st.data())
def test_what_never_moves_is_found_and_nothing_else(counts: list[int], data: st.DataObject) -> None:
    models = [model for model, count in enumerate(counts) for _ in range(data.draw(st.integers(0, count)))]
    queues = st.sets(st.integers(0, len(counts) - 1), max_size=2)
    others = st.sets(st.integers(0, max(0, len(models) - 1)), max_size=1)
    plan: Plan = [(model, data.draw(queues), data.draw(others)) for model in models]
    places = [Places(count) for count in counts]
    executions = [Execution(places[model]) for model in models]
    for execution, (model, asked, waited) in zip(executions, plan, strict=True):
        execution.waits |= {("queue", one): places[one] for one in asked}
        execution.waits |= {("execution", one): executions[one] for one in waited}
        if execution.waits:
            places[model].blocked.add(execution)
    full = _full_at_the_end(plan, counts)
    assert [is_stuck(place) for place in places] == [model in full for model in range(len(counts))]


def _full_at_the_end(plan: Plan, counts: list[int]) -> set[int]:
    """The models without a free place when nothing moves any more: what waits at a free place is answered at once, and
    an execution that waits for nothing ends."""
    left = dict(enumerate(plan))
    while True:
        held = [model for model, _, _ in left.values()]
        full = {model for model, count in enumerate(counts) if held.count(model) == count}
        ended = [n for n, (_, asked, waited) in left.items() if not asked & full and not waited & left.keys()]
        if not ended:
            return full
        for number in ended:
            del left[number]
