"""Which sequences are remembered, and for how long."""

from __future__ import annotations

from penstock.gateway.traffic.route import SequencePins


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
