"""Guesses of a draft model: they change nothing but the number of steps, and what is in its cache is always right.

The fake model refuses to read what was never written there, and its logits depend on every token that they see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.contract.step import BlockUpdate, SchedulerOutput
from penstock.engines.core import EngineCore
from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.batch import StepBatch
from penstock.engines.kit.draft_model import DraftModel
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.kvcache import KVGroup
from support.engine import Driver
from unit.engines.kit.fake_model import FakeModel, logits_after
from unit.engines.kit.test_step_runner import REQUESTS, alone

GROUPS = (KVGroup(4),)


class SpyingModel(FakeModel):
    """Keeps what it was asked to compute: the context of each of its logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.contexts: list[list[int]] = []
        self.num_tokens: list[int] = []

    def _compute(self, batch: StepBatch) -> Any:
        self.num_tokens.append(len(batch.positions))
        return super()._compute(batch)

    def _context(self, batch: StepBatch, i: int, position: int) -> list[int]:
        context = super()._context(batch, i, position)
        self.contexts.append(context)
        return context


def make(
    num_blocks: int = 40, num_buffers: int = 2, max_len: int = 64, max_tokens: int = 64, **options: Any
) -> tuple[StepRunner, SpyingModel]:
    model, draft = FakeModel(GROUPS, num_blocks, num_buffers, **options), SpyingModel(GROUPS, num_blocks, 1)
    info = msgspec.structs.replace(model.info, has_draft_model=True)
    drafts = DraftModel(draft, 4, num_blocks, max_len, max_tokens, clock=lambda: 0.0)
    return StepRunner(model, info, max_num_seqs=8, model_dir=Path("unused"), draft_model=drafts), draft


def drive(runner: StepRunner, **limits: Any) -> Driver:
    return Driver(runner, **{"max_num_seqs": 8, "speculative": "draft_model", **limits})


def argmax_after(context: list[int]) -> int:
    return int(logits_after(context, [0]).argmax())


@settings(max_examples=40)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(18, 60),
    tokens=st.integers(8, 40),
    depth=st.integers(1, 3),
    lazy=st.booleans(),
    max_len=st.sampled_from([20, 64]),
    max_tokens=st.sampled_from([3, 64]),
    pauses=st.booleans(),
)
def test_everyone_gets_what_it_gets_alone(
    requests: Any,
    num_blocks: int,
    tokens: int,
    depth: int,
    lazy: bool,
    max_len: int,
    max_tokens: int,
    pauses: bool,
) -> None:
    """Under preemption, prefix hits, forks and prompts in parts; and whatever the draft model sees of a request are
    that request's own tokens."""
    runner, draft = make(num_blocks, depth, max_len, max_tokens, lazy=lazy)
    driver = drive(runner, max_num_batched_tokens=tokens, steps_in_flight=depth)
    if pauses:  # guesses are now worth it, now not: it has to catch up
        _guess_now_and_then(driver)
    texts = texts_as_alone(driver, requests)
    for context in draft.contexts:
        assert any(_is_continued(context, text) for text in texts)


def texts_as_alone(driver: Driver, requests: Any) -> list[list[int]]:
    """Prompts and outputs. Each output is what its request gets alone."""
    wanted = []
    for number, (prompt, count, n, params, pause) in enumerate(requests):
        ids = driver.add(prompt, count, n, seed=100 * number, **params)
        wanted += [(i, prompt, count, 100 * number + nth, params) for nth, i in enumerate(ids)]
        for _ in range(pause):
            driver.step()
    driver.run()
    texts = []
    for request_id, prompt, count, seed, params in wanted:
        assert driver.ends[request_id].error is None
        assert driver.tokens[request_id] == alone(prompt, count, seed, [0], **params)[0]
        texts.append([*prompt, *driver.tokens[request_id]])
    return texts


def _is_continued(context: list[int], text: list[int]) -> bool:
    """The context begins with tokens of the text, and goes on with the likeliest ones, up to the most guesses."""
    known = next((n for n, pair in enumerate(zip(context, text, strict=False)) if pair[0] != pair[1]), len(text))
    known = min(known, len(context))
    return known > 0 and all(context[n] == argmax_after(context[:n]) for n in range(known, len(context)))


def _guess_now_and_then(driver: Driver) -> None:
    assert isinstance(driver.core, EngineCore)
    speculation = driver.core.scheduler.speculation
    guesses, calls = speculation.guesses, iter(range(1 << 30))

    def now_and_then(run: Any, room: int, worth: Any) -> list[int]:
        return guesses(run, room, worth) if next(calls) % 7 < 3 else []

    speculation.guesses = now_and_then  # type: ignore[method-assign]


def test_right_guesses_save_steps_and_are_counted() -> None:
    runner, draft = make()
    driver = drive(runner)
    [request] = driver.add([0, 1, 2], 40)
    driver.run()
    stats = driver.stats
    assert driver.tokens[request] == alone([0, 1, 2], 40, 0, [0])[0]
    assert stats.accepted_tokens == stats.draft_tokens > 30, "the same model guesses greedily what is sampled greedily"
    assert stats.steps <= 8
    assert max(draft.num_tokens[1:]) <= 2, "what was right is not computed again"


def test_the_draft_model_does_not_work_for_nothing() -> None:
    """Prompts that nobody asked guesses for are none of its business, and neither are the others of a step."""
    runner, draft = make()
    driver = drive(runner)
    driver.add([0, 1, 2, 3, 4], 1)
    driver.run()
    assert not draft.num_batches


def test_a_prefix_hit_is_one_for_the_draft_model_too() -> None:
    runner, draft = make()
    driver = drive(runner)
    prompt = [0, 1, 3, 2, 5, 4, 1, 1, 0, 2, 4, 3, 3]
    driver.add(prompt, 6)
    driver.run()
    assert draft.num_tokens[0] == len(prompt) + 2, "it catches up at the first guess"
    draft.num_tokens.clear()
    driver.add(prompt, 6)
    driver.run()
    assert draft.num_tokens[0] <= 3


def test_it_catches_up_by_parts() -> None:
    runner, draft = make(max_tokens=5)
    driver = drive(runner)
    prompt = [0, 1, 3, 2, 5, 4, 1, 1, 0, 2, 4, 3, 3]
    [request] = driver.add(prompt, 20)
    driver.run()
    assert driver.tokens[request] == alone(prompt, 20, 0, [0])[0]
    assert draft.num_tokens[:2] == [5, 5]
    assert driver.stats.accepted_tokens


def test_there_are_no_guesses_beyond_its_context() -> None:
    runner, draft = make(max_len=12)
    driver = drive(runner)
    [request] = driver.add([0, 1, 2], 40)
    driver.run()
    assert driver.tokens[request] == alone([0, 1, 2], 40, 0, [0])[0]
    assert max(map(len, draft.contexts)) == 12
    assert 0 < driver.stats.draft_tokens < 12


def test_rows_of_recurrent_states_are_no_blocks() -> None:
    draft = DraftModel(FakeModel(GROUPS, 2, 1), 4, 2, 64, 64)
    draft._fill([0, 1], 0, 8)
    draft.follow(SchedulerOutput(block_loads=[(5, None)], block_updates=[BlockUpdate(1, 1, 0, [0, 7])]))
    assert draft._filled.tolist() == [4, 4]
    draft.follow(SchedulerOutput(block_loads=[(1, None)], block_updates=[BlockUpdate(1, 0, 0, [0])]))
    assert draft._filled.tolist() == [0, 0]


def test_a_draft_model_that_fails_is_a_step_that_fails() -> None:
    runner, draft = make()
    driver = drive(runner)
    [first] = driver.add([0, 1, 2], 20)
    driver.run(until=lambda: len(driver.tokens[first]) > 4)
    draft.fails = True
    driver.run()
    assert driver.ends[first].error is not None
    [second] = driver.add([0, 1, 2], 20)
    driver.run()
    assert driver.tokens[second] == alone([0, 1, 2], 20, 0, [0])[0]


def test_an_engine_without_one_says_so() -> None:
    model = FakeModel(GROUPS, 40, 2)
    runner = StepRunner(model, model.info, max_num_seqs=8, model_dir=Path("unused"))
    with pytest.raises(UnsupportedError, match=r"--speculative-model: this engine has no draft model \(fake\)"):
        EngineCore(runner, SchedulerConfig(speculative="draft_model"), lambda: 0.0)
