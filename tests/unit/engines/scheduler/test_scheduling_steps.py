"""What exactly one step contains, for each of the situations that a scheduler knows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.kvcache import KVGroup, StateGroup
from penstock.kvcache.table import blocks_of_request
from unit.engines.scheduler.harness import alone, greedy, make_rig


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
    assert new.block_ids[0][1] == destination != source
    (output,) = result.outputs
    assert output.prompt is not None
    assert output.prompt.num_cached_tokens == 7
    rig.run()
    assert rig.tokens[2] == alone(range(8), greedy(2))[0]


def test_a_traced_request_is_told_of_its_prompt_s_steps() -> None:
    rig = make_rig(max_num_batched_tokens=4, max_num_seqs=4)
    traced = msgspec.structs.replace(rig.request(range(10)), traced=True)
    outputs = [output for result in (rig.step(traced), rig.step(), rig.step()) for output in result.outputs]
    [chunks] = [output.prompt.chunks for output in outputs if output.prompt]
    assert chunks is not None
    assert [chunk.num_tokens for chunk in chunks] == [4, 4, 2]
    assert all(chunk.scheduled <= chunk.done for chunk in chunks)
    [output] = rig.step(rig.request([77])).outputs[-1:]
    assert output.prompt is not None
    assert output.prompt.chunks is None


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


def test_wide_requests_take_seats_as_they_come() -> None:
    rig = make_rig(64, max_num_seqs=3, max_num_batched_tokens=6)
    rig.step(rig.request([0] * 10, n=8, max_tokens=2), rig.request([1], max_tokens=1))
    assert rig.counts() == {1: 6}
    rig.step()
    assert rig.counts() == {1: 4, 9: 1}, "nobody waits for the eight seats of the first"
    rig.step()
    assert rig.last.request_ids == [1, 2, 3], "three seats are free, and three of the eight have them"
    rig.run()
    assert [rig.tokens[i] for i in range(2, 9)] == [rig.tokens[1]] * 7
    assert sum(step.total_num_scheduled_tokens for step in rig.runner.steps) <= 10 + 1 + 8 * 2 + 5 * 2


def test_samples_that_fork_find_the_seats_of_those_that_end_in_the_same_step() -> None:
    rig = make_rig(32, max_num_seqs=2)
    rig.step(rig.request([5], max_tokens=1), rig.request([0] * 6, n=2, max_tokens=3))
    rig.step()
    assert rig.last.request_ids == [2, 3]
    rig.run()


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
    assert rig.tokens[1] == alone([0, 1], greedy(5))[0]
    assert rig.tokens[2] == alone([1, 0, 1], greedy(4))[0], "nothing twice, nothing missing"


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


def test_the_one_that_does_not_fit_is_not_looked_at_again_until_blocks_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig(4, 16)
    admit, looks = rig.scheduler.kv.admit, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return admit(*args, **options)

    monkeypatch.setattr(rig.scheduler.kv, "admit", counted)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([1] * 40, max_tokens=1))
    for _ in range(5):
        rig.step()
    assert looks == 2
    rig.run()
    assert (looks, len(rig.tokens[2])) == (3, 1)


# -- windows ---------------------------------------------------------------------------------------------------


WINDOWS = (KVGroup(16), KVGroup(16, 32))
"""Small windows: at most 512 tokens of one request go into a step."""


def test_a_step_takes_less_of_one_prompt_where_layers_have_windows() -> None:
    rig = make_rig(400, groups=WINDOWS, max_num_batched_tokens=1200)
    rig.step(rig.request(range(900)))
    assert rig.counts() == {1: 512}
    rig.step(rig.request(range(1, 901)), rig.request(range(2, 302)))
    assert rig.counts() == {1: 388, 2: 512, 3: 300}
    rig.run()


def test_running_prompts_get_no_more_than_that_either() -> None:
    rig = make_rig(600, groups=WINDOWS, max_num_batched_tokens=2400)
    rig.step(*(rig.request(range(first, first + 900)) for first in range(5)))
    assert rig.counts() == {1: 512, 2: 512, 3: 512, 4: 512, 5: 352}
    rig.step()
    assert rig.counts() == {1: 388, 2: 388, 3: 388, 4: 388, 5: 512}, "of 548"
    rig.run()


def test_windows_leave_a_step_as_much_as_the_runners_own_depth_allows() -> None:
    """Two windows of 1024 for the three steps that the runner takes, not for the six that were asked for."""
    rig = make_rig(600, groups=[KVGroup(4), KVGroup(4, 1024)], max_num_batched_tokens=900, steps_in_flight=6)
    rig.run(rig.request(range(900)))
    assert rig.runner.steps[0].num_scheduled_tokens == [2 * 1024 // 3]


def test_what_is_left_over_gives_no_prompt_more_than_that() -> None:
    rig = make_rig(400, groups=WINDOWS, max_num_batched_tokens=520)
    rig.step(rig.request(range(512), max_tokens=1), rig.request(range(1, 901)))
    assert rig.counts() == {1: 512, 2: 8}
    rig.step()
    assert rig.counts() == {2: 512}, "of 520, although its last block has room for eight more"
    rig.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_gives_back_what_lies_behind_its_windows_while_it_is_computed(depth: int) -> None:
    rig = make_rig(400, groups=WINDOWS, max_num_batched_tokens=1200, steps_in_flight=depth)
    pool, most = rig.scheduler.kv.pool, 0

    def before(_: object) -> None:
        nonlocal most
        most = max(most, pool.num_blocks - pool.num_free)

    rig.runner.before = before
    rig.run(rig.request(range(900)))
    assert 900 // 16 < most <= blocks_of_request(WINDOWS, 904, depth * 512)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_window_needs_at_once_is_reckoned_with_what_a_step_takes(depth: int) -> None:
    """The smallest pool that holds the request: it runs there, and one with a block less refuses it."""
    num_blocks = blocks_of_request(WINDOWS, 904, 512)
    assert num_blocks < blocks_of_request(WINDOWS, 904, 1200)
    for short, reason in ((0, "length"), (1, "error")):
        rig = make_rig(num_blocks - short, groups=WINDOWS, max_num_batched_tokens=1200, steps_in_flight=depth)
        rig.run(rig.request(range(900)))
        assert rig.ended[1].finish_reason == reason


@pytest.mark.parametrize("depth", [1, 2])
def test_the_context_that_is_told_is_the_longest_request_that_is_taken(depth: int) -> None:
    """Windows that cost as much as the full attention: 33 blocks of each for a window and a step."""
    rig = make_rig(265, groups=[KVGroup(4), *[KVGroup(4, 64)] * 5], steps_in_flight=depth)
    longest = rig.core.info.context_length
    assert longest == 4 * (265 - 5 * 33)
    prompt = range(longest - 1)
    rig.run(rig.request(prompt, max_tokens=1), rig.request(prompt, max_tokens=2))
    assert [rig.ended[i].finish_reason for i in (1, 2)] == ["length", "error"]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0, "max_num_seqs": 1},
        {"max_queued_tokens": 0},
        {"max_queued_requests": -1},
        {"ageing_seconds": -1.0},
        {"steps_in_flight": 0},
        {"itl_target_ms": -1.0},
        {"max_draft_tokens": -1},
        {"max_num_seqs": 9, "max_num_batched_tokens": 8},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        SchedulerConfig(**limits)  # type: ignore[arg-type]


def test_a_step_ends_at_the_checkpoint_near_a_prompts_end() -> None:
    """Once for each prompt, and whatever is left of the step goes to others."""
    rig = make_rig(100, groups=(KVGroup(2),), states=StateGroup(64, 40, 2))
    rig.step(rig.request(range(40), max_tokens=2))
    assert rig.counts() == {1: 32}
    rig.step(rig.request(range(100, 150), max_tokens=1))
    assert rig.counts() == {1: 8, 2: 42}
    rig.step()
    assert rig.counts() == {1: 1, 2: 8}
