"""What an engine that schedules by itself is given to hold, and what stays back."""

from __future__ import annotations

from penstock.engines.scheduler.queues import Policy
from unit.engines.autonomous.rig import make_rig
from unit.engines.scheduler.harness import alone


def test_no_more_requests_than_seats() -> None:
    rig = make_rig(max_num_seqs=3)
    rig.step(*(rig.request([i], max_tokens=5) for i in range(8)))
    most = 0
    while rig.core.has_work:
        most = max(most, rig.core.stats().num_running)
        rig.step()
    assert most == 3
    assert len(rig.ended) == 8


def test_prompts_are_handed_over_while_blocks_suffice() -> None:
    rig = make_rig(num_blocks=10, block_size=4)
    rig.step(*(rig.request([i] * 16, max_tokens=2) for i in range(3)))
    assert rig.started() == [1, 2], "4 blocks each, and one stays free"
    rig.run()
    assert rig.started() == [1, 2, 3]


def test_blocks_of_prompts_that_are_not_computed_yet_are_taken() -> None:
    """Of prompts computed in chunks the engine has given only some blocks so far, or none at all."""
    rig = make_rig(num_blocks=20, block_size=4, budget=8)
    rig.step(rig.request([1] * 32, max_tokens=2), rig.request([2] * 32, max_tokens=2))
    assert rig.batcher.num_free_blocks >= 8, "the engine would say that there is room"
    rig.step(rig.request([3] * 16, max_tokens=2))
    assert rig.started() == [1, 2]


def test_a_smaller_request_does_not_overtake_the_next_one() -> None:
    rig = make_rig(num_blocks=12, block_size=4)
    rig.step(rig.request([1] * 32, max_tokens=8))
    rig.step(rig.request([2] * 24, max_tokens=2), rig.request([3], max_tokens=2))
    assert rig.started() == [1]
    rig.run()
    assert rig.started() == [1, 2, 3]


def test_a_request_that_needs_every_block_runs_alone() -> None:
    rig = make_rig(num_blocks=8, block_size=4)
    rig.step(rig.request([1] * 30, max_tokens=2), rig.request([2], max_tokens=2))
    assert rig.started() == [1]
    rig.run()
    assert rig.started() == [1, 2]
    assert len(rig.ended) == 2


def test_a_large_request_waits_for_an_empty_engine_and_gets_it() -> None:
    rig = make_rig(num_blocks=8, block_size=4)
    rig.step(rig.request([1], max_tokens=6))
    rig.step(rig.request([2] * 30, max_tokens=2), rig.request([3], max_tokens=2))
    rig.run()
    assert rig.started() == [1, 2, 3]
    assert rig.core.stats().finished == {"length": 3}


def test_after_a_preemption_nothing_is_handed_over_until_a_request_has_ended() -> None:
    rig = make_rig(num_blocks=8, block_size=2, max_num_seqs=3)
    requests = [rig.request([i] * 4, max_tokens=10) for i in range(2)]
    rig.step(*requests)
    while not rig.core.stats().preemptions:
        rig.step()
    late = rig.request([7], max_tokens=1)
    rig.step(late)
    while not rig.ended:
        assert rig.started() == [1, 2]
        rig.step()
    rig.run()
    for request in (*requests, late):
        assert rig.tokens[request.ids[0]] == alone(request.prompt_token_ids, request.params)[0]


def test_the_seat_of_an_aborted_request_stays_taken_until_it_is_released() -> None:
    rig = make_rig(max_num_seqs=2, abort_after=3)
    rig.step(rig.request([1], max_tokens=90), rig.request([2], max_tokens=90))
    rig.step(rig.abort(1), rig.request([3], max_tokens=2))
    assert rig.ended.keys() == {1}, "its client need not wait"
    for _ in range(2):
        rig.step()
        assert rig.started() == [1, 2]
        assert rig.core.stats().num_running == 2
    rig.step()
    rig.step()
    assert rig.started() == [1, 2, 3]


def test_an_aborted_request_that_ends_by_itself_has_left() -> None:
    rig = make_rig(max_num_seqs=1, abort_after=50)
    rig.step(rig.request([1], max_tokens=3), rig.request([2], max_tokens=1))
    rig.step(rig.abort(1))
    assert rig.run() < 10
    assert rig.core.stats().finished == {"abort": 1, "length": 1}


def test_a_seat_that_is_never_given_back_costs_the_others_nothing_but_itself() -> None:
    rig = make_rig(max_num_seqs=2, abort_after=None)
    rig.step(rig.request([1], max_tokens=3))
    rig.step(rig.abort(1))
    others = [rig.request([2], max_tokens=2) for _ in range(3)]
    rig.step(*others)
    while len(rig.ended) < 4:
        rig.step()
        assert rig.core.stats().num_running <= 2
    assert rig.core.stats().num_running == 1


def test_priorities_do_not_disturb_what_runs() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.PRIORITY)
    rig.step(rig.request([1], max_tokens=6, priority=5))
    rig.step(rig.request([2], max_tokens=2, priority=-5))
    assert not rig.ended
    rig.run()
    assert list(rig.ended) == [1, 2]
