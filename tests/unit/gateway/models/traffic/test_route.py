"""Which target a key belongs to."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.models.traffic.route import SequencePins, choose, fraction

KEYS = [b"key %d" % number for number in range(10_000)]
weights = st.dictionaries(st.text(min_size=1, max_size=80), st.floats(0, 100), min_size=1, max_size=6)


def test_shares_are_as_the_weights_say() -> None:
    """Five standard deviations: of 10,000 keys with a chance of 10 % each, 30."""
    counts = {"a": 0, "b": 0}
    for key in KEYS:
        counts[choose(key, [("a", 90), ("b", 10)]) or ""] += 1
    assert abs(counts["b"] - 1000) < 150
    shared = "x" * 100
    long_names = [choose(key, [(shared + "1", 1), (shared + "2", 1)]) for key in KEYS]
    assert abs(long_names.count(shared + "1") - 5000) < 250


@settings(max_examples=50)
@given(st.binary(), weights, st.data())
def test_a_weight_that_grows_takes_keys_and_moves_no_other(key: bytes, given_weights: dict[str, float], data) -> None:
    grown = data.draw(st.sampled_from(sorted(given_weights)))
    more = given_weights | {grown: given_weights[grown] + data.draw(st.floats(0, 100))}
    before, after = choose(key, given_weights.items()), choose(key, more.items())
    assert after in (before, grown)


@settings(max_examples=50)
@given(st.binary(), weights, st.data())
def test_only_the_keys_of_one_that_goes_move(key: bytes, given_weights: dict[str, float], data) -> None:
    gone = data.draw(st.sampled_from(sorted(given_weights)))
    before = choose(key, given_weights.items())
    after = choose(key, [(name, weight) for name, weight in given_weights.items() if name != gone])
    assert after == before or before == gone


@settings(max_examples=50)
@given(st.binary(), weights)
def test_the_same_key_has_the_same_target_in_any_order_and_none_without_a_weight(key, given_weights) -> None:
    found = choose(key, given_weights.items())
    assert found == choose(key, reversed(given_weights.items()))
    assert (found is None) == (not any(given_weights.values()))
    assert found is None or given_weights[found] > 0


@settings(max_examples=50)
@given(st.binary(), st.text())
def test_a_fraction_is_above_0_and_at_most_1(key: bytes, salt: str) -> None:
    assert 0 < fraction(key, salt.encode("utf-8", "replace").decode()) <= 1


def test_a_pin_ends_when_its_sequence_has_been_idle() -> None:
    pins = SequencePins()
    pins.keep(1, "a", now=0, idle_seconds=10)
    pins.keep(2, "b", now=5, idle_seconds=10)
    pins.keep(1, "a", now=9, idle_seconds=10)
    pins.keep(3, "a", now=16, idle_seconds=10)
    assert [pins.get(sequence, 16) for sequence in (1, 2, 3)] == ["a", None, "a"]
    assert pins.targets() == {"a"}
    assert pins.get(3, 26) is None, "although no other sequence has come since"


def test_of_too_many_the_one_used_longest_ago_goes() -> None:
    pins = SequencePins(most=2)
    for sequence in (1, 2, 1, 3):
        pins.keep(sequence, "a", now=0, idle_seconds=10)
    assert (len(pins), pins.get(2, 0)) == (2, None)
    pins.drop(1)
    pins.drop(1)
    assert pins.targets() == {"a"}
    assert len(pins) == 1
    pins.keep(3, "b", now=0, idle_seconds=10)
    assert pins.targets() == {"b"}
    pins.drop(3)
    assert pins.targets() == set()
