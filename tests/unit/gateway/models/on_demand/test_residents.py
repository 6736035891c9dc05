"""Who may be unloaded, over any order of loads, uses and time."""

from __future__ import annotations

import math
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.gateway.models.on_demand.residents import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_RESIDENCE,
    Failures,
    Residents,
    choose,
)

PARTS = {"pair": {"a", "b"}, "tower": {"pair", "c"}}
"""Ensembles."""
NAMES = ("a", "b", "c", *PARTS)
USUAL = 20.0
"""Seconds that a model stays without a use."""
names = st.sampled_from(NAMES)


def whole(name: str) -> set[str]:
    """The model, and all that it is made of."""
    return {name}.union(*(whole(part) for part in PARTS.get(name, ())))


class ResidentsMachine(RuleBasedStateMachine):
    """Beside plain notes of everything that has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.now = 0.0
        self.uses: list[str] = []
        self.loaded: dict[str, float] = {}
        """Until when each is safe."""
        self.kept: set[str] = set()
        self.last_used: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        """Of those that have a time of their own."""
        self.busy: set[str] = set()

    @rule(seconds=st.floats(0.1, 50))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names, took=st.sampled_from([0.0, 0.0, 5.0, 1000.0]), kept=st.sampled_from([False, False, False, True]))
    def load(self, name: str, took: float, kept: bool) -> None:
        """With what it is made of, as far as that is not there."""
        for each in NAMES:
            if each == name or (each in whole(name) and each not in self.loaded):
                mine = kept and each == name
                self.residents.loaded(each, self.now, took, PARTS.get(each, ()), kept=mine)
                self.loaded[each] = self.now + min(took, MOST_RESIDENCE)
                self.last_used[each] = self.now
                self.idle.pop(each, None)
                (self.kept.add if mine else self.kept.discard)(each)

    @rule(name=names)
    def leave(self, name: str) -> None:
        """With the ensembles that it is part of, as the repository does it."""
        for each in NAMES:
            if name in whole(each):
                self.residents.left(each)
                self.loaded.pop(each, None)
                self.kept.discard(each)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 30.0, math.inf]), at_once=st.booleans())
    def keep(self, data: st.DataObject, seconds: float, at_once: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.residents.keep(name, seconds, 0.0 if at_once else math.inf)
        self.idle[name] = seconds
        if at_once:
            self.loaded[name] = 0.0

    @rule(name=names)
    def use(self, name: str) -> None:
        self.residents.begin(name, self.now)
        self.uses.append(name)
        self.last_used[name] = self.now

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.uses))
        self.uses.remove(name)
        self.residents.end(name, self.now)
        self.last_used[name] = self.now

    @rule(busy=st.sets(names, max_size=1))
    def change_busy(self, busy: set[str]) -> None:
        self.busy = busy

    def above(self, name: str) -> set[str]:
        return {each for each in self.loaded if name in whole(each)}

    @invariant()
    def frees_what_nobody_needs(self) -> None:
        free = self.residents.free(self.now, self.busy.__contains__)
        expected = {
            name
            for name in self.loaded
            if not any(
                each in self.uses or each in self.kept or each in self.busy or self.loaded[each] > self.now
                for each in self.above(name)
            )
        }
        assert set(free) == expected
        times = [max(self.last_used[each] for each in self.above(name)) for name in free]
        assert times == sorted(times)

    @invariant()
    def ends_what_nobody_uses(self) -> None:
        ends = self.residents.idle_ends(USUAL)
        assert set(ends) == {name for name in self.loaded if not self.above(name) & {*self.uses, *self.kept}}
        for name, end in ends.items():
            above = self.above(name)
            assert end == max(self.last_used[each] + self.idle.get(each, USUAL) for each in above) or end in (
                self.loaded[each] for each in above
            )
            assert all(end >= self.loaded[each] for each in above)
        own = {name for name in NAMES if self.residents.has_own_idle_time(name)}
        assert own == self.idle.keys() & self.loaded.keys()

    @invariant()
    def could_replace_what_is_only_in_use(self) -> None:
        found = set(self.residents.replaceable(self.now, self.busy.__contains__))
        free = set(self.residents.free(self.now, self.busy.__contains__))
        assert free == {name for name in found if not self.above(name) & set(self.uses)}

    @invariant()
    def keeps_what_kept_ensembles_need(self) -> None:
        expected = set[str]().union(*(whole(name) for name in self.kept)) & self.loaded.keys()
        assert self.residents.kept() == expected


ResidentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestResidents = ResidentsMachine.TestCase


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=1), st.integers(0, 8)), st.integers(1, 20))
def test_no_more_models_go_than_have_to(sizes: dict[str, int], need: int) -> None:
    def enough(gone: Collection[str]) -> bool:
        return sum(sizes[name] for name in gone) >= need

    candidates = list(sizes)
    chosen = choose(candidates, enough)
    if chosen is None:
        assert not enough(candidates)
        return
    assert enough(chosen)
    assert not any(enough([each for each in chosen if each != name]) for name in chosen)
    last = max(map(candidates.index, chosen))
    assert not enough(candidates[:last]), "a model that was used later went, though those before it were enough"


def test_one_large_model_goes_instead_of_it_and_a_small_one() -> None:
    sizes = {"small": 1, "large": 10, "other": 10}
    assert choose(list(sizes), lambda gone: sum(sizes[name] for name in gone) >= 10) == ["large"]


def test_the_pause_doubles_until_the_model_is_loaded() -> None:
    failures, now, pauses = Failures(), 0.0, []
    for _ in range(7):
        failure = failures.add("m", "why", now)
        assert failures.current("m", failure.until - 0.1) is failure
        assert failures.current("m", failure.until) is None
        pauses.append(failure.pause)
        now = failure.until
    assert pauses == [10, 20, 40, 80, 160, 300, 300]
    assert (FIRST_PAUSE, LONGEST_PAUSE) == (10, 300)
    failures.forget("m")
    assert failures.add("m", "why", now).pause == 10


def test_models_are_told_apart() -> None:
    failures = Failures()
    failures.add("m", "why", 0.0)
    assert failures.current("other", 1.0) is None
