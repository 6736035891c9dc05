"""The scheduler's benchmarks do what they say in each of their steps."""

from __future__ import annotations

import pytest

from benchmarks.micro.suite.stage import Stage, decoding, prefilling, storm

STEPS = 50


def advance(stage: Stage) -> tuple[int, int, int]:
    """(prompt tokens, generated tokens, preemptions) of STEPS steps."""

    def figures() -> tuple[int, int, int]:
        stats = stage.scheduler.stats()
        return stats.prompt_tokens, stats.generation_tokens, stats.preemptions

    before = figures()
    for _ in range(STEPS):
        stage.step()
    prompt, generated, preemptions = (after - earlier for after, earlier in zip(figures(), before, strict=True))
    return prompt, generated, preemptions


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_decoding_is_all_that_happens(policy: str) -> None:
    stage = decoding(4, 3, policy, STEPS)
    assert advance(stage) == (0, 4 * STEPS, 0)
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (4, 3)


def test_every_step_computes_a_whole_budget_of_prompts() -> None:
    prompt, generated, preemptions = advance(prefilling(STEPS))
    assert prompt == STEPS * 512
    # prompts share a step, so the last of them may still be under way
    assert STEPS * 512 // 1600 - generated in (0, 1)
    assert preemptions == 0


def test_in_a_storm_requests_go_and_come_back_all_the_time() -> None:
    stage = storm(STEPS)
    _, generated, preemptions = advance(stage)
    assert preemptions > STEPS
    assert generated > 64 * STEPS
    assert stage.scheduler.stats().num_waiting > 0
    stage.scheduler.kv.check_integrity()
