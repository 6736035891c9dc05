"""What exactly one step contains, for each of the situations that a scheduler knows."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.scheduler.config import SchedulerConfig
from unit.engines.scheduler.harness import alone, make_rig, next_token


def test_a_prompt_is_computed_in_one_step_when_it_fits() -> None:
    rig = make_rig()
    request = rig.request(range(10), max_tokens=3)
    rig.step(request)
    assert rig.counts() == {1: 10}
    assert rig.tokens[1] == alone(range(10), request.params)[0][:1]
    rig.step()
    assert rig.counts() == {1: 1}


def test_chunks_of_a_prompt_share_steps_with_decodes() -> None:
    rig = make_rig(32, max_num_seqs=4, max_num_batched_tokens=8)
    rig.step(rig.request([1, 2, 3], max_tokens=10), rig.request([4, 5], max_tokens=10))
    assert rig.counts() == {1: 3, 2: 2}
    rig.step(rig.request([0] * 15, max_tokens=10))
    assert rig.counts() == {1: 1, 2: 1, 3: 6}
    rig.step()
    assert rig.counts() == {1: 1, 2: 1, 3: 6}
    assert rig.last.num_computed_tokens == [4, 3, 6]
    assert rig.tokens.get(3, []) == []
    rig.step()
    assert rig.counts() == {1: 1, 2: 1, 3: 3}
    assert len(rig.tokens[3]) == 1
    rig.step()
    assert rig.counts() == {1: 1, 2: 1, 3: 1}


def test_a_chunk_leaves_a_token_of_the_budget_for_everybody_behind_it() -> None:
    rig = make_rig(32, max_num_seqs=3, max_num_batched_tokens=4)
    rig.step(rig.request([0] * 9))
    rig.step()
    assert rig.counts() == {1: 4}
    rig.step(rig.request([1]), rig.request([2]))
    assert rig.counts() == {1: 1, 2: 1, 3: 1}
    rig.run()


def test_two_prompts_in_chunks_both_advance() -> None:
    rig = make_rig(32, max_num_seqs=2, max_num_batched_tokens=6)
    rig.step(rig.request([0] * 4), rig.request([1] * 12))
    assert rig.counts() == {1: 4, 2: 2}
    rig.step()
    assert rig.counts() == {1: 1, 2: 5}
    rig.step()
    assert rig.counts() == {1: 1, 2: 5}
    rig.step()
    assert rig.counts() == {1: 1, 2: 1}


def test_seats_are_never_exceeded() -> None:
    rig = make_rig(max_num_seqs=2)
    rig.step(*(rig.request([i], max_tokens=2) for i in range(4)))
    assert rig.last.request_ids == [1, 2]
    rig.step()
    assert rig.last.request_ids == [1, 2]
    rig.step()
    assert rig.last.request_ids == [3, 4], "seats are free in the step after an end"


def test_a_hit_on_everything_computes_one_token_on_a_copy() -> None:
    rig = make_rig()
    rig.run(rig.request(range(8), max_tokens=1))
    result = rig.step(rig.request(range(8), max_tokens=2))
    assert rig.counts() == {2: 1}
    ((source, destination),) = rig.last.block_copies
    (new,) = rig.last.new_requests
    assert new.block_ids[1] == destination != source
    (output,) = result.outputs
    assert output.prompt is not None
    assert output.prompt.num_cached_tokens == 7
    rig.run()
    assert rig.tokens[2] == alone(range(8), SamplingParams(max_tokens=2))[0]


def test_the_output_of_one_request_is_the_prefix_of_the_next() -> None:
    rig = make_rig()
    prompt = [1, 2, 3]
    rig.run(rig.request(prompt, max_tokens=6))
    turn = [*prompt, *rig.tokens[1], 5]
    rig.step(rig.request(turn))
    assert rig.last.num_computed_tokens == [8], "the last token was sampled, never computed: two full blocks"


def test_blocks_are_shared_as_soon_as_they_are_full() -> None:
    rig = make_rig(32, 4, max_num_batched_tokens=12)
    rig.step(rig.request(range(11), max_tokens=9))
    rig.step(rig.request(range(11)))
    assert rig.last.num_computed_tokens == [11, 8], "the first one is still running"
    rig.step(rig.request([*range(11), *rig.tokens[1][:1], 0]))
    assert rig.last.num_computed_tokens == [12, 11, 12], "its third block became full with its first token"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_samples_of_one_prompt_compute_it_once(length: int) -> None:
    rig = make_rig(32)
    request = rig.request(range(length), n=3, max_tokens=5)
    rig.step(request)
    assert rig.counts() == {1: length}
    rig.step()
    assert rig.counts() == {1: 1, 2: 1, 3: 1}
    assert rig.last.num_computed_tokens == [length, length - 1, length - 1]
    rig.run()
    expected = alone(range(length), request.params)[0]
    assert [rig.tokens[i] for i in (1, 2, 3)] == [expected] * 3


def test_samples_that_find_no_seat_wait() -> None:
    rig = make_rig(32, max_num_seqs=2)
    rig.run(rig.request(range(6), n=5, max_tokens=3))
    assert [rig.tokens[i] for i in range(1, 6)] == [rig.tokens[1]] * 5
    assert max(len(step.request_ids) for step in rig.runner.steps) == 2


def test_samples_keep_their_seats_while_the_prompt_is_computed() -> None:
    rig = make_rig(32, max_num_seqs=3, max_num_batched_tokens=6)
    rig.step(rig.request([0] * 10, n=3), rig.request([1]))
    rig.step()
    assert rig.counts() == {1: 4}, "tokens are left, but no seats: two are promised"
    assert rig.scheduler.num_waiting == 1
    rig.step()
    assert rig.last.request_ids == [1, 2, 3]
    rig.run()
    assert len(rig.tokens[4]) == 4


def test_seats_that_were_promised_are_free_again_after_an_abort() -> None:
    rig = make_rig(32, max_num_seqs=3, max_num_batched_tokens=6)
    rig.step(rig.request([0] * 10, n=3), rig.request([1]))
    rig.step(rig.abort(2))
    assert rig.counts() == {1: 4, 4: 1}


def test_the_last_in_order_is_preempted_and_starts_over() -> None:
    rig = make_rig(4, 2, max_num_seqs=2, enable_prefix_caching=False)
    rig.step(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4))
    assert rig.last.request_ids == [1, 2]
    rig.step()
    assert (rig.scheduler.stats().num_free_blocks, rig.counts()) == (0, {1: 1, 2: 1})
    while not rig.scheduler.stats().preemptions:
        rig.step()
    assert rig.counts() == {1: 1}
    assert rig.last.dropped_ids == [2]
    rig.run()
    assert rig.tokens[1] == alone([0, 1], SamplingParams(max_tokens=5))[0]
    assert rig.tokens[2] == alone([1, 0, 1], SamplingParams(max_tokens=4))[0], "nothing twice, nothing missing"


def test_a_preempted_request_is_introduced_with_the_tokens_it_has() -> None:
    rig = make_rig(4, 2, max_num_seqs=2)
    rig.run(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4))
    resumed = [new for step in rig.runner.steps for new in step.new_requests if new.id == 2][1]
    assert resumed.num_prompt_tokens == 3
    assert len(resumed.token_ids) >= 5


def test_an_admission_leaves_room_for_those_who_run() -> None:
    rig = make_rig(4, 2, max_num_seqs=4)
    rig.step(rig.request([0], max_tokens=2))
    rig.step(rig.request([1] * 5, max_tokens=1))
    assert rig.last.request_ids == [1], "three of three free blocks: none would be left to grow into"
    rig.step()
    assert rig.last.request_ids == [2]


def test_nobody_overtakes_the_one_that_does_not_fit() -> None:
    rig = make_rig(4, 2, max_num_seqs=4)
    rig.step(rig.request([0, 1, 0], max_tokens=3))
    rig.step(rig.request([1] * 5, max_tokens=1), rig.request([0], max_tokens=1))
    assert rig.last.request_ids == [1]
    rig.run()
    assert [step.new_requests[0].id for step in rig.runner.steps if step.new_requests] == [1, 2, 3]


def test_the_simulated_model_depends_on_every_token() -> None:
    histories = [[a, b, c] for a in range(8) for b in range(8) for c in range(8)]
    assert len({next_token(history, vocab_size=1 << 40) for history in histories}) == 512


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0, "max_num_seqs": 1},
        {"max_queued_tokens": 0},
        {"max_queued_requests": -1},
        {"ageing_seconds": -1.0},
        {"max_num_seqs": 9, "max_num_batched_tokens": 8},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        SchedulerConfig(**limits)  # type: ignore[arg-type]
