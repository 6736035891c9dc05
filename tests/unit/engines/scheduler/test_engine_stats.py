"""Counters and gauges, and what a request's prompt information says."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import PromptInfo, SamplingParams, TokenLogprobs
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVGroup
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, make_rig


def test_counters_add_up() -> None:
    rig = make_rig(max_num_seqs=4, max_queued_requests=2)
    rig.run(
        rig.request(range(10), max_tokens=5),
        rig.request([1, 2], n=2, max_tokens=3),
        rig.request([NAN]),
        rig.request([3], deadline=rig.clock.now - 1),
        rig.request([0] * 900),
        rig.request([4]),
        rig.request([5]),
    )
    rig.run(rig.request([RAISE]))
    stats = rig.scheduler.stats()
    assert stats.finished == {
        "length": 4,
        "error:numerical_error": 1,
        "error:deadline_exceeded": 1,
        "error:context_length_exceeded": 1,
        "error:step_failed": 1,
        "error:queue_full": 1,
    }
    assert stats.admitted == sum(stats.finished.values()) == 9
    assert stats.generation_tokens == sum(map(len, rig.tokens.values()))


def test_prompt_tokens_are_those_computed() -> None:
    rig = make_rig(32, max_num_seqs=2, max_num_batched_tokens=4)
    rig.run(rig.request(range(10), max_tokens=3))
    assert rig.scheduler.stats().prompt_tokens == 10
    rig.run(rig.request(range(10), max_tokens=3))
    stats = rig.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)
    assert stats.prompt_tokens == 10 + 2
    assert stats.generation_tokens == 6
    assert stats.steps == len(rig.runner.steps)
    # each request's last token is sampled and never computed
    assert sum(step.total_num_scheduled_tokens for step in rig.runner.steps) == 12 + 6 - 2


def test_the_one_token_after_a_full_hit_is_counted() -> None:
    rig = make_rig()
    rig.run(rig.request(range(8), max_tokens=2))
    rig.run(rig.request(range(8), max_tokens=2))
    assert rig.scheduler.stats().prompt_tokens == 8 + 1


def test_gauges_are_of_this_moment() -> None:
    rig = make_rig(16, 4, max_num_seqs=2)
    result = rig.step(rig.request(range(8), max_tokens=9), rig.request([1], max_tokens=9), rig.request([2] * 5))
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 1, 5)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (16, 13, 2)
    assert [(step.num_requests, step.num_tokens) for step in result.steps] == [(2, 9)]


def test_samples_wait_until_their_prompt_is_computed() -> None:
    rig = make_rig(32, max_num_seqs=4, max_num_batched_tokens=4)
    rig.step(rig.request(range(10), n=3))
    assert rig.scheduler.stats().num_waiting == 2
    rig.step(rig.abort(1))
    rig.run()
    assert rig.scheduler.stats().finished == {"abort": 1, "length": 2}


def test_guesses_are_counted() -> None:
    rig = make_rig(64, vocab_size=FIRST + 1, speculative="ngram", max_draft_tokens=3)
    rig.run(rig.request([FIRST] * 4, max_tokens=12))
    stats = rig.scheduler.stats()
    assert stats.draft_tokens == stats.accepted_tokens == 8, "a model that says one word only: 1, 4, 4, 3"
    assert (stats.generation_tokens, stats.steps) == (12, 4)


def test_failed_steps_are_counted() -> None:
    rig = make_rig()
    rig.run(rig.request([0]), rig.request([RAISE]))
    stats = rig.scheduler.stats()
    assert stats.step_failures == 2, "both together, then one alone"
    assert stats.finished == {"length": 1, "error:step_failed": 1}


def test_the_first_output_tells_of_the_prompt() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.step(rig.request(range(8), max_tokens=2))
    second = rig.request(range(8), max_tokens=2)
    rig.step(second)
    rig.clock.now += 3
    (output,) = rig.step().outputs
    assert output.prompt == PromptInfo(num_cached_tokens=7, queue_seconds=3.0)
    (output,) = rig.step().outputs
    assert output.prompt is None


# -- prompt logprobs -------------------------------------------------------------------------------------------


class LogprobsRig:
    """A scheduler whose runner answers with logprobs that name their position."""

    def __init__(self, *, num_blocks: int = 32, budget: int = 64, seats: int = 8) -> None:
        info = ModelInfo(
            vocab_size=10,
            max_model_len=1000,
            kv_groups=(KVGroup(2),),
            num_blocks=num_blocks,
            eos_token_ids=(),
            runner="",
        )
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget), info)
        self.rig = make_rig()
        self.prompts: dict[int, PromptInfo] = {}

    def add(self, prompt: list[int], n: int = 1, *, wanted: bool = True, max_tokens: int = 2) -> None:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if wanted else None, logprobs=0)
        self.scheduler.add(self.rig.request(prompt, n, params=params))

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule(0.0)
        result = ModelRunnerOutput([])
        for request_id, start, count in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            request = self.scheduler.intake.requests[request_id]
            done = start + count == request.num_tokens
            result.sampled_token_ids.append([5] if done else [])
            if request.params.prompt_logprobs is not None:
                last = min(start + count, request.num_prompt_tokens - 1)
                result.prompt_logprobs[request_id] = [entry(request.token_ids[p + 1]) for p in range(start, last)]
            if done:
                result.logprobs[request_id] = [entry(5)]
        self.scheduler.update_from_output(result, 0.0)
        for output in self.scheduler.take_outputs():
            if output.prompt is not None:
                self.prompts[output.id] = output.prompt
            assert (output.logprobs or []) == [entry(5)] * len(output.token_ids)
        return step

    def run(self) -> None:
        while self.scheduler.has_requests:
            self.step()

    def got(self, request_id: int) -> list[int] | None:
        logprobs = self.prompts[request_id].logprobs
        return None if logprobs is None else [entry.token_id for entry in logprobs]


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, [])


@pytest.mark.parametrize("budget", [2, 3, 64])
def test_prompt_logprobs_read_nothing_from_the_cache(budget: int) -> None:
    rig = LogprobsRig(budget=budget, seats=2)
    rig.add([1, 2, 3, 4, 5], wanted=False)
    rig.run()
    queries = rig.scheduler.stats().prefix_queries
    rig.add([1, 2, 3, 4, 5])
    rig.run()
    assert rig.got(1) is None
    assert rig.got(2) == [2, 3, 4, 5]
    assert rig.prompts[2].num_cached_tokens == 0
    assert rig.scheduler.stats().prefix_queries == queries, "nothing was looked up"


@pytest.mark.parametrize("seats", [1, 8])
def test_the_prompts_logprobs_come_with_the_first_sample(seats: int) -> None:
    rig = LogprobsRig(seats=seats)
    rig.add([1, 2, 3, 4, 5], n=3)
    rig.run()
    assert [rig.got(request_id) for request_id in (1, 2, 3)] == [[2, 3, 4, 5], None, None]


@pytest.mark.parametrize("steps", [0, 1])
def test_the_next_sample_has_the_prompts_logprobs_where_the_first_ended_too_early(steps: int) -> None:
    rig = LogprobsRig(budget=2, seats=2)
    rig.add([1, 2, 3, 4, 5], n=3)
    for _ in range(steps):
        rig.step()
    rig.scheduler.abort([1], 0.0)
    rig.run()
    assert [rig.got(request_id) for request_id in (2, 3)] == [[2, 3, 4, 5], None]


def test_a_preemption_takes_nothing_back_that_was_given() -> None:
    rig = LogprobsRig(num_blocks=4, seats=2)
    rig.add([1, 2], wanted=False, max_tokens=6)
    rig.add([3, 4, 5], max_tokens=4)
    while not rig.scheduler.stats().preemptions:
        rig.step()
    assert rig.got(2) == [4, 5]
    rig.run()
    assert rig.got(2) == [4, 5]


def test_the_harness_model_has_no_logprobs() -> None:
    info = make_rig().runner.info
    assert isinstance(info, ModelInfo)
    assert not info.supports_logprobs
