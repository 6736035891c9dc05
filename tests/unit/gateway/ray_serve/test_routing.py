"""Which replica gets a request."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.ray_serve.routing import RouteTable

IDLE = dict.fromkeys("abc", 0)


def test_a_prompt_goes_where_its_beginning_has_been():
    table: RouteTable[str] = RouteTable()
    for replica in "cab":
        table.sent([f"{replica}1", f"{replica}2"], replica)
    for replica in "abc":
        assert table.choose([f"{replica}1", f"{replica}2", "new"], IDLE)[0] == replica


def test_the_longest_known_beginning_counts():
    table: RouteTable[str] = RouteTable()
    table.sent(["system", "one"], "a")
    table.sent(["system", "two"], "b")
    assert table.choose(["system", "one"], IDLE)[0] == "a"


def test_a_known_system_prompt_alone_does_not_decide():
    table: RouteTable[str] = RouteTable()
    table.sent(["system"], "a")
    assert table.choose(["system", "x1", "x2", "x3"], IDLE)[0] != "a"


def test_a_conversation_that_has_doubled_stays():
    table: RouteTable[str] = RouteTable()
    table.sent(["1", "2"], "b")
    assert table.choose(["1", "2", "3", "4", "5"], IDLE)[0] == "b"


def test_requests_without_a_key_take_turns_while_all_are_idle():
    table: RouteTable[str] = RouteTable()
    chosen = Counter[str]()
    for _ in range(30):
        best = table.choose([], IDLE)[0]
        table.sent([], best)
        chosen[best] += 1
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_a_busy_replica_does_not_get_what_it_knows():
    table: RouteTable[str] = RouteTable()
    table.sent(["x"], "a")
    assert table.choose(["x"], {"a": 4, "b": 0, "c": 0})[0] == "a"
    assert table.choose(["x"], {"a": 40, "b": 10, "c": 12})[0] == "b"


def test_a_replica_that_cannot_serve_comes_last():
    table: RouteTable[str] = RouteTable()
    table.sent(["x"], "a")
    assert table.choose(["x"], {"a": 0, "b": 7, "c": 5}, avoid=["a"]) == ["c", "b", "a"]


def test_a_replica_that_has_ended_is_forgotten():
    table: RouteTable[str] = RouteTable()
    table.sent(["x"], "a")
    table.sent(["y"], "b")
    table.keep(frozenset("bc"))
    assert len(table) == 1
    assert table.choose(["x"], {"b": 1, "c": 0}) == ["c", "b"]


@given(
    st.lists(st.tuples(st.lists(st.sampled_from("uvwxyz"), max_size=6), st.sampled_from("abc"))),
    st.lists(st.sampled_from("uvwxyz"), max_size=6),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 50), min_size=1),
)
def test_every_replica_is_ranked_once_and_memory_is_bounded(sent, key, loads):
    table: RouteTable[str] = RouteTable(most_hashes=4)
    for each, replica in sent:
        table.sent(each, replica)
    assert sorted(table.choose(key, loads)) == sorted(loads)
    assert len(table) <= 4
