"""Which replica gets a request."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.replicas.routing import (
    MORE_REQUESTS,
    REQUEST_TOKENS,
    SESSION_TOKENS,
    PrefixIndex,
    ReplicaLoad,
    Router,
)
from penstock.engines.replicas.state import RoutingPolicy

BLOCK = 16
IDLE = [ReplicaLoad(0, num_free_blocks=1000), ReplicaLoad(1, num_free_blocks=1000)]


def router(policy: str = "prefix", replicas: int = 2, num_blocks: int = 1000) -> Router:
    return Router(RoutingPolicy(policy), [num_blocks] * replicas, BLOCK)


def prompt(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=12)), st.integers(1, 10))
def test_an_index_holds_what_was_used_last(sent: list[list[int]], capacity: int) -> None:
    index, expected = PrefixIndex(capacity), OrderedDict[bytes, None]()
    for blocks in sent:
        hashes = [bytes([block]) for block in blocks]
        assert index.matched(hashes) == next((n for n, key in enumerate(hashes) if key not in expected), len(hashes))
        index.add(hashes)
        for key in reversed(hashes[:capacity]):
            expected[key] = None
            expected.move_to_end(key)
        while len(expected) > capacity:
            expected.popitem(last=False)
        assert len(index) == len(expected) <= capacity
        assert index.matched(hashes[:capacity]) == min(len(hashes), capacity), "the newest prompt's beginning stays"


def test_a_prompt_goes_where_its_beginning_is() -> None:
    routes = router()
    first = routes.request(prompt(160))
    assert routes.rank(first, IDLE) == [0, 1]
    routes.sent(first, 1)
    assert routes.rank(routes.request(prompt(160) + prompt(40, 900)), IDLE)[0] == 1
    assert routes.rank(routes.request(prompt(160, 2)), IDLE)[0] == 0, "nothing of it is anywhere: least recently chosen"


@pytest.mark.parametrize(
    "fields", [{"adapter": "a"}, {"salt": "s"}], ids=["another adapter's blocks", "another tenant's blocks"]
)
def test_blocks_are_told_apart_as_in_the_cache(fields: dict[str, str]) -> None:
    routes = router()
    routes.sent(routes.request(prompt(160)), 1)
    assert routes.cached(routes.request(prompt(160), **fields), 1) == 0
    assert routes.cached(routes.request(prompt(160)), 1) == 159, "one token is always computed"


def test_a_hit_is_worth_what_it_saves() -> None:
    routes = router()
    routes.sent(routes.request(prompt(160)), 1)
    wanted = routes.request(prompt(160) + [7] * 16)
    as_much = 160 // REQUEST_TOKENS
    busy = [ReplicaLoad(0, num_free_blocks=1000), ReplicaLoad(1, as_much - 1, num_free_blocks=1000)]
    busier = [busy[0], ReplicaLoad(1, as_much + 1, num_free_blocks=1000)]
    assert routes.rank(wanted, busy)[0] == 1
    assert routes.rank(wanted, busier)[0] == 0
    waiting = [busy[0], ReplicaLoad(1, 1, 160, num_free_blocks=1000)]
    assert routes.rank(wanted, waiting)[0] == 0


@pytest.mark.parametrize(("least", "bound"), [(0, MORE_REQUESTS), (100, 200)])
def test_no_prefix_and_no_session_is_worth_more_than_the_load_bound(least: int, bound: int) -> None:
    routes = router(num_blocks=10_000)
    request = routes.request(prompt(100_000), session="s")
    routes.sent(request, 1)
    assert routes.rank(request, [ReplicaLoad(0, least), ReplicaLoad(1, bound)]) == [1, 0]
    assert routes.rank(request, [ReplicaLoad(0, least), ReplicaLoad(1, bound + 1)]) == [0, 1]
    assert routes.rank(request, [ReplicaLoad(1, bound + 1)]) == [1]


def test_a_replica_s_own_word_counts_and_what_it_was_just_sent() -> None:
    routes = router()
    request = replace(routes.request(prompt(160)), reported={1: 64})
    assert (routes.cached(request, 0), routes.cached(request, 1)) == (0, 64)
    for number in range(2):
        routes.sent(request, number)
        assert routes.cached(request, number) == 159, "until it has computed it"
        routes.computed(request, number)
    assert routes.cached(request, 0) == 159, "it says nothing itself"
    assert routes.cached(request, 1) == 64


def test_what_is_handed_over_goes_by_load() -> None:
    """It is there for all of them, so what one has cached of it saves nothing."""
    routes = router()
    tokens = prompt(640)
    routes.sent(routes.request(tokens), 0)
    loads = [ReplicaLoad(0, num_requests=2), ReplicaLoad(1, num_requests=1)]
    assert routes.rank(routes.request(tokens), loads) == [0, 1]
    handed = replace(routes.request(tokens), num_handed=640)
    assert routes.rank(handed, loads) == [1, 0]
    assert routes.to_compute(handed, 1) == 1


def test_tokens_without_a_free_block_count_twice() -> None:
    routes = router()
    wanted = routes.request(prompt(160))
    full = [ReplicaLoad(0, num_free_blocks=4), ReplicaLoad(1, 2, num_free_blocks=1000)]
    assert routes.cost(wanted, full[0]) == 160 + 160 - 4 * BLOCK
    assert routes.rank(wanted, full)[0] == 1


def test_a_session_stays_while_that_costs_little() -> None:
    routes = router()
    routes.sent(routes.request(prompt(8), session="s"), 1)
    routes.sent(routes.request(prompt(8)), 0)
    few, many = SESSION_TOKENS // REQUEST_TOKENS - 1, SESSION_TOKENS // REQUEST_TOKENS + 1
    wanted = routes.request(prompt(8, 50), session="s")
    assert routes.rank(wanted, [IDLE[0], ReplicaLoad(1, few)])[0] == 1
    assert routes.rank(wanted, [IDLE[0], ReplicaLoad(1, many)])[0] == 0
    routes.emptied(1)
    assert routes.rank(wanted, [IDLE[0], ReplicaLoad(1, 1)])[0] == 0


def test_what_a_restarted_replica_had_is_forgotten() -> None:
    routes = router()
    request = routes.request(prompt(160))
    routes.sent(request, 1)
    routes.emptied(1)
    assert routes.cached(request, 1) == routes.num_known_blocks(1) == 0


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
def test_other_policies_do_not_look_at_prefixes(policy: str) -> None:
    routes = router(policy)
    routes.sent(routes.request(prompt(160), session="s"), 1)
    wanted = routes.request(prompt(160), session="s")
    assert wanted.hashes == ()
    assert routes.rank(wanted, IDLE)[0] == 0


def test_least_loaded_and_in_turn() -> None:
    loads = [ReplicaLoad(0, 5), ReplicaLoad(1, 2), ReplicaLoad(2, 3)]
    by_load, in_turn = router("least-loaded", 3), router("round-robin", 3)
    assert by_load.rank(by_load.request([1]), loads) == [1, 2, 0]
    chosen = []
    for _ in range(6):
        [best, *_] = in_turn.rank(in_turn.request([1]), loads)
        in_turn.sent(in_turn.request([1]), best)
        chosen.append(best)
    assert chosen == [0, 1, 2, 0, 1, 2]


def hit_rate(policy: str) -> float:
    """40 conversations of 6 turns at 4 replicas, whose caches hold a quarter of them each."""
    order = random.Random(5)
    routes = router(policy, 4, num_blocks=40 * 6 * 4 // 4)
    caches = [PrefixIndex(40 * 6 * 4 // 4) for _ in range(4)]
    by_prefix = router("prefix")
    asked = found = 0
    for turn in range(1, 7):
        for conversation in order.sample(range(40), 40):
            tokens = [conversation] * 32 + prompt(64 * turn, 1000 * conversation)
            request = routes.request(tokens)
            [best, *_] = routes.rank(request, [ReplicaLoad(n) for n in range(4)])
            routes.sent(request, best)
            hashes = by_prefix.request(tokens).hashes
            asked += len(hashes)
            found += caches[best].matched(hashes)
            caches[best].add(hashes)
    return found / asked


def test_prefix_routing_finds_more_than_taking_turns() -> None:
    assert hit_rate("prefix") >= 1.5 * hit_rate("round-robin")


def test_routing_needs_no_event_loop() -> None:
    """So that a simulation of fleets can use it."""
    code = "import sys, penstock.engines.replicas.routing; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
