"""The batcher: every text is in one batch, and batches stay within their budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.encoder.engine import EncodeRequest, TextQueue
from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import QueueFullError

BUDGET = 24


def request(*lengths: int) -> EncodeRequest:
    return EncodeRequest([TokenizedText([7] * length) for length in lengths])


def queue(max_requests: int = 100, max_tokens: int = 10_000) -> TextQueue:
    return TextQueue(BUDGET, max_requests, max_tokens)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
STEPS = st.lists(st.one_of(LENGTHS, st.sampled_from(["take", "remove"])), max_size=30)


@given(STEPS, st.randoms(use_true_random=False))
def test_each_text_is_taken_once_within_the_budget(steps: list[list[int] | str], draw: object) -> None:
    tested, requests, removed = queue(), list[EncodeRequest](), set[EncodeRequest]()
    taken: list[tuple[EncodeRequest, int]] = []

    def take() -> bool:
        batch = tested.take()
        lengths = [len(each.text) for each in batch]
        assert len(lengths) == 1 or sum(lengths) <= BUDGET
        assert len(lengths) <= 1 or len(lengths) * max(lengths) <= 2 * BUDGET
        taken.extend((each.request, each.number) for each in batch)
        return bool(batch)

    for step in steps:
        if step == "take":
            take()
        elif step == "remove":
            if requests:
                removed.add(requests[len(taken) % len(requests)])
                tested.remove(requests[len(taken) % len(requests)])
        else:
            requests.append(request(*map(int, step)))
            tested.add(requests[-1])
        waiting = [each for each in requests if each not in removed and each.taken < len(each.texts)]
        assert len(tested) == len(waiting)
        assert tested.num_tokens == sum(each.waiting_tokens for each in waiting)
    while take():
        pass
    assert len(taken) == len(set(taken))
    wanted = {(each, number) for each in requests if each not in removed for number in range(len(each.texts))}
    assert wanted <= set(taken)
    assert (len(tested), tested.num_tokens) == (0, 0)


def test_requests_take_turns() -> None:
    tested, large, small = queue(), request(*[8] * 9), request(8)
    tested.add(large)
    tested.add(small)
    assert [(each.request, each.number) for each in tested.take()] == [(large, 0), (small, 0), (large, 1)]


def test_what_did_not_fit_begins_the_next_batch() -> None:
    tested, first, long, short = queue(), request(10), request(20), request(10)
    for each in (first, long, short):
        tested.add(each)
    assert [each.request for each in tested.take()] == [first, short]
    assert [each.request for each in tested.take()] == [long]


def test_the_queue_is_bounded() -> None:
    by_requests = queue(max_requests=2)
    by_requests.add(request(1))
    by_requests.add(request(1))
    with pytest.raises(QueueFullError):
        by_requests.add(request(1))
    by_tokens = queue(max_tokens=50)
    by_tokens.add(request(30))
    with pytest.raises(QueueFullError):
        by_tokens.add(request(21))
    by_tokens.add(request(20))


def test_a_request_larger_than_the_queue_is_let_in_when_nothing_waits() -> None:
    tested = queue(max_tokens=50)
    tested.add(request(*[20] * 5))
    with pytest.raises(QueueFullError):
        tested.add(request(1))
