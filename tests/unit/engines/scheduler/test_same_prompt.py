"""The same prompt several times at once: it is computed once, and no other request waits for that."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.scheduler.queues import Policy
from unit.engines.scheduler.harness import NAN, RAISE, Rig, alone, greedy, make_rig

PROMPT = list(range(20))


def prompt_tokens(rig: Rig) -> int:
    return rig.scheduler.stats().prompt_tokens


def num_passed_by(rig: Rig) -> int:
    intake = rig.scheduler.intake
    return intake.num_waiting - len(intake.waiting)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 64])
def test_it_is_computed_once(depth: int, budget: int) -> None:
    rig = make_rig(64, max_num_batched_tokens=budget, steps_in_flight=depth)
    requests = [rig.request(PROMPT, max_tokens=3) for _ in range(5)]
    rig.run(*requests)
    assert prompt_tokens(rig) == 20 + 4, "each of the others computes the last token, for its logits"
    for request in requests:
        assert rig.tokens[request.ids[0]] == alone(PROMPT, request.params)[0]


def test_a_common_beginning_is_computed_once() -> None:
    rig = make_rig(64)
    rig.run(*(rig.request([*PROMPT, i, i]) for i in range(4)))
    assert prompt_tokens(rig) == 20 + 4 * 2


def test_all_of_them_go_on_together_once_it_is_cached() -> None:
    rig = make_rig(64)
    rig.run(rig.request(PROMPT, max_tokens=1))
    rig.step(*(rig.request(PROMPT) for _ in range(4)))
    assert rig.counts() == {2: 1, 3: 1, 4: 1, 5: 1}


def test_those_that_need_other_blocks_pass_by() -> None:
    rig = make_rig(64, max_num_batched_tokens=16)
    rig.step(rig.request([1] * 24), rig.request([1] * 24))
    rig.step(rig.request([2, 3]))
    assert rig.counts() == {1: 8, 3: 2}
    assert num_passed_by(rig) == 1
    assert rig.scheduler.num_waiting == 1
    rig.step()
    assert set(rig.counts()) == {1, 2, 3}
    rig.run()


def test_more_of_them_than_seats_keep_nobody_waiting() -> None:
    rig = make_rig(64, max_num_seqs=2, max_num_batched_tokens=16)
    rig.step(*(rig.request([1] * 24, max_tokens=1) for _ in range(9)))
    rig.step(rig.request([2, 3]))
    assert rig.counts() == {1: 8, 10: 2}
    assert num_passed_by(rig) == 8
    rig.run()
    assert sorted(rig.ended) == list(range(1, 11))
    assert prompt_tokens(rig) == 24 + 8 + 2


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_who_was_passed_by_keeps_its_place(policy: Policy) -> None:
    rig = make_rig(64, max_num_seqs=2, max_num_batched_tokens=16, policy=policy)
    rig.step(rig.request([1] * 24, max_tokens=2), rig.request([1] * 24), rig.request([2], max_tokens=1))
    rig.step()
    assert set(rig.counts()) == {1, 3}
    rig.step(rig.request([4]))
    assert set(rig.counts()) == {1, 2}, "before the one that came later"
    rig.run()


def test_who_is_ahead_does_not_wait_for_one_behind_it() -> None:
    prompt = PROMPT * 3
    rig = make_rig(128, max_num_batched_tokens=8, policy=Policy.PRIORITY)
    rig.step(rig.request(prompt, max_tokens=2, priority=100))
    rig.step(rig.request(prompt, max_tokens=2, priority=0))
    assert 2 in rig.counts()
    rig.step(rig.request(prompt, max_tokens=2, priority=5))
    assert num_passed_by(rig) == 1, "the second one is ahead of the third"
    while 2 not in rig.ended:  # others keep the first one from advancing
        rig.step(rig.request([9, *range(7)], max_tokens=1, priority=10))
    assert 1 not in rig.ended
    rig.run()
    assert [rig.tokens[i] for i in (1, 2, 3)] == [alone(prompt, greedy(2))[0]] * 3


@pytest.mark.parametrize("marker", [NAN, RAISE])
def test_if_it_fails_the_next_one_finds_out_for_itself(marker: int) -> None:
    rig = make_rig(64)
    rig.run(*(rig.request([*PROMPT, marker]) for _ in range(2)), rig.request([*PROMPT, 1, 1]))
    assert sorted(i for i, output in rig.ended.items() if output.error is not None) == [1, 2]
    assert rig.tokens[3] == alone([*PROMPT, 1, 1], greedy(4))[0]


@pytest.mark.parametrize("how", ["abort", "deadline"])
@pytest.mark.parametrize("victim", [1, 2])
def test_either_can_be_given_up(how: str, victim: int) -> None:
    rig = make_rig(64, max_num_batched_tokens=8)
    late = rig.clock.now + 1 if how == "deadline" else None
    prompts = {1: [*PROMPT, *[9] * 40], 2: PROMPT}
    rig.step(*(rig.request(prompts[i], max_tokens=2, deadline=late if i == victim else None) for i in (1, 2)))
    assert num_passed_by(rig) == 0, "the step was full"
    rig.step()
    assert num_passed_by(rig) == 1
    assert rig.scheduler.stats().num_waiting_tokens == 20
    rig.clock.now += 2
    rig.run(*([rig.abort(victim)] if how == "abort" else []))
    other = 3 - victim
    assert rig.tokens[other] == alone(prompts[other], greedy(2))[0]
    assert num_passed_by(rig) == 0


def test_it_is_computed_again_if_its_first_request_was_preempted() -> None:
    rig = make_rig(12, max_num_seqs=3, max_num_batched_tokens=8)
    rig.step(rig.request([7], max_tokens=30))
    rig.step(rig.request(PROMPT, max_tokens=2), rig.request(PROMPT, max_tokens=2))
    rig.step()
    run = rig.scheduler.running.runs[-1]
    assert run.request.id == 2
    assert rig.scheduler._preempt() is run
    rig.run()
    assert rig.tokens[2] == rig.tokens[3] == alone(PROMPT, greedy(2))[0]


def test_without_a_prefix_cache_nobody_waits() -> None:
    rig = make_rig(64, enable_prefix_caching=False)
    rig.step(*(rig.request(PROMPT) for _ in range(3)))
    assert len(rig.counts()) == 3


def test_who_scores_its_prompt_computes_it() -> None:
    rig = make_rig(64)
    scores = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    rig.step(rig.request(PROMPT), rig.request(PROMPT, params=scores))
    assert rig.counts() == {1: 20, 2: 20}


def test_salts_and_adapters_share_nothing() -> None:
    rig = make_rig(64)
    rig.step(rig.request(PROMPT), rig.request(PROMPT, salt="s"), rig.request(PROMPT, adapter="s"))
    assert len(rig.counts()) == 3
