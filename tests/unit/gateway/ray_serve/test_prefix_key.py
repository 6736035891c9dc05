"""Prompts that begin alike have keys that begin alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.ray_serve.prefix_key import RouteKey, prefix_hashes, request_hashes, session_hash

NAMES = st.text("abcXYZ019-_", min_size=1)


def key(body: object, session: str | None = None) -> list[str]:
    return list(request_hashes(json.dumps(body).encode(), session))


def chat(*contents: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


@given(st.binary(max_size=30_000), st.binary(max_size=3_000), st.binary(max_size=3_000))
def test_as_many_hashes_are_the_same_as_the_texts_have_steps_in_common(start, one, other):
    texts = start + one, start + other
    first, second = (list(prefix_hashes(text)) for text in texts)
    same_bytes = common(*texts)
    assert common(first, second) == len(list(prefix_hashes(texts[0][:same_bytes])))


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of their first items are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_the_next_turn_of_a_conversation_begins_with_the_key_of_the_turn_before():
    before = chat("x" * 2000)
    after = chat("x" * 2000, "answer " * 100, "more " * 100)
    assert len(key(before)) > 5
    assert key(after)[: len(key(before))] == key(before)


def test_fields_that_are_no_part_of_the_prompt_change_nothing():
    assert key(chat("x" * 2000)) == key({"temperature": 0, "stream": True, **chat("x" * 2000), "max_tokens": 7})


def test_another_model_or_other_tools_make_another_prompt():
    keys = [key(chat("x" * 2000, **changed)) for changed in ({}, {"model": "n"}, {"tools": [{"type": "function"}]})]
    assert len({each[0] for each in keys}) == 3


def test_a_session_is_the_last_hash_wherever_it_is_said():
    assert key(chat("short"), "s")[-1] == session_hash("s")
    assert key(chat("short", prompt_cache_key="s")) == [session_hash("s")]
    assert key(chat("short", prompt_cache_key="t"), "s") == [session_hash("s")]
    assert key(chat("short")) == []


def test_bodies_that_are_no_request_have_at_most_a_session():
    for body in (b"", b"[1, 2]", b"\xff\xfe", b'{"messages": '):
        assert request_hashes(body, None) == ()
        assert request_hashes(body, "s") == (session_hash("s"),)


def test_fields_of_other_types_than_they_should_have_are_the_replica_s_business():
    assert request_hashes(b'{"model": 3, "messages": {"a": [1]}, "prompt_cache_key": 5}', None) == ()


def test_the_key_of_the_longest_body_fits_into_a_header():
    assert len(str(RouteKey(tuple(key(chat("x" * ((1 << 20) - 100)), "s"))))) < 2000


@given(st.lists(NAMES).map(tuple), st.lists(NAMES).map(tuple))
def test_a_router_reads_what_a_proxy_has_written(hashes, avoid):
    written = RouteKey(hashes, avoid)
    assert RouteKey.read(str(written)) == written


def test_a_session_that_no_proxy_has_seen_is_a_key_as_well():
    assert RouteKey.read("s") == RouteKey((session_hash("s"),))
    assert RouteKey.read("") == RouteKey()
