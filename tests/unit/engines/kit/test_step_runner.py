"""Whatever the steps look like and how many are under way, each request gets what it would get alone, one token at a
time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.contract.messages import PoolingParams, SamplingParams, TokenLogprobs
from penstock.engines.contract.step import NewRequest, SchedulerOutput
from penstock.engines.errors import EngineError, InvalidRequestError, NumericalError
from penstock.engines.kit.sampling import Sampler, SamplingState, token_logprobs_rows
from penstock.engines.kit.step_runner import StepRunner
from penstock.kvcache import KVGroup
from support.engine import Driver
from unit.engines.kit.fake_model import POISON, VOCAB_SIZE, FakeModel, logits_after

GROUPS = {
    "whole": (KVGroup(4),),
    "window": (KVGroup(4, window=6),),
    "mixed": (KVGroup(4, window=5), KVGroup(4), KVGroup(4, window=5)),
}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0, "temperature": 1.5},
    {"logit_bias": {3: 2.0}},
]


def make(groups: str = "whole", num_blocks: int = 40, num_buffers: int = 2, **options: Any) -> StepRunner:
    model = FakeModel(GROUPS[groups], num_blocks, num_buffers, **options)
    return StepRunner(model, model.info, max_num_seqs=8, model_dir=Path("unused"))


def alone(prompt: list[int], count: int, seed: int, windows: list[int], **params: Any) -> tuple[list[int], list[Any]]:
    """Tokens and logprobs of one request, from the definition."""
    p = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **params})
    state, tokens, entries = SamplingState.create(p, seed, (), prompt, []), list(prompt), []
    for _ in range(count):
        logits = logits_after(tokens, windows)
        token = int(Sampler(VOCAB_SIZE).sample(logits[None], [state])[0])
        if state is not None:
            state.append(token)
        if p.logprobs is not None:
            entries.append(token_logprobs_rows(logits[None], np.array([token]), p.logprobs)[0])
        tokens.append(token)
    return tokens[len(prompt) :], entries


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, POISON - 1), min_size=1, max_size=25),
        st.integers(1, 18),
        st.integers(1, 3),
        st.sampled_from(PARAMS),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=40)
@given(
    requests=REQUESTS,
    groups=st.sampled_from(list(GROUPS)),
    num_blocks=st.integers(34, 60),
    tokens=st.integers(8, 40),
    depth=st.integers(1, 3),
    lazy=st.booleans(),
    speculative=st.sampled_from(["off", "ngram"]),
    scored=st.sampled_from([2, 1000]),
)
def test_everyone_gets_what_it_gets_alone(
    requests: Any, groups: str, num_blocks: int, tokens: int, depth: int, lazy: bool, speculative: Any, scored: int
) -> None:
    runner = make(groups, num_blocks, depth, lazy=lazy)
    runner._max_scored = scored
    driver = Driver(
        runner, max_num_seqs=8, max_num_batched_tokens=tokens, steps_in_flight=depth, speculative=speculative
    )
    logprobs: dict[int, list[TokenLogprobs]] = {}
    wanted = []
    for number, (prompt, count, n, params, pause) in enumerate(requests):
        ids = driver.add(prompt, count, n, seed=100 * number, **params)
        wanted += [(i, prompt, count, 100 * number + nth, params) for nth, i in enumerate(ids)]
        for _ in range(pause):
            for output in driver.step():
                logprobs.setdefault(output.id, []).extend(output.logprobs or [])
    while len(driver.ends) < len(wanted):
        for output in driver.step():
            logprobs.setdefault(output.id, []).extend(output.logprobs or [])
    windows = [group.window for group in GROUPS[groups]]
    for request_id, prompt, count, seed, params in wanted:
        assert driver.ends[request_id].error is None
        expected = alone(prompt, count, seed, windows, **params)
        assert (driver.tokens[request_id], logprobs[request_id]) == expected


def test_guesses_are_right_now_and_then() -> None:
    """Or the test above would say nothing of them."""
    driver = Driver(make(), max_num_seqs=8, speculative="ngram")
    for number in range(6):
        driver.add([0, 1, 2, 3, 4, 5, 0, 1], 40, seed=number, temperature=0.3)
    driver.run()
    assert 0 < driver.stats.accepted_tokens < driver.stats.draft_tokens


@pytest.mark.parametrize("scored", [3, 1000])
def test_logprobs_of_prompts(scored: int) -> None:
    runner = make()
    runner._max_scored = scored
    prompt = [0, 1, 3, 2, 5, 4, 1, 1, 0, 2, 4]
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=8)
    [request_id], [bystander] = driver.add(prompt, 3, prompt_logprobs=2), driver.add([3, 1], 9)
    entries = []
    while len(driver.ends) < 2:
        entries += [o.prompt.logprobs for o in driver.step() if o.id == request_id and o.prompt]
    behind = np.stack([logits_after(prompt[:n], [0]) for n in range(1, len(prompt))])
    expected = token_logprobs_rows(behind, np.array(prompt[1:]), 2)
    assert entries == [expected]
    assert driver.tokens[request_id] == alone(prompt, 3, 0, [0])[0]
    assert driver.tokens[bystander] == alone([3, 1], 9, 0, [0])[0]


def test_a_request_with_nan_fails_alone() -> None:
    driver = Driver(make(), max_num_seqs=8)
    [ill], [well] = driver.add([1, POISON], 5), driver.add([1, 2], 5)
    [scored] = driver.add([1, POISON, 2], 5, prompt_logprobs=0)
    driver.run()
    assert driver.tokens[ill] == driver.tokens[scored] == []
    assert "not finite" in driver.ends[ill].error.message
    assert "not finite" in driver.ends[scored].error.message
    assert driver.tokens[well] == alone([1, 2], 5, 0, [0])[0]
    assert not driver.stats.step_failures, "the steps behind had a token all the same"


@pytest.mark.parametrize("stop", range(POISON))
def test_what_lies_behind_a_stop_among_guesses_is_not_told(stop: int) -> None:
    prompt = [*range(POISON)] * 3
    driver = Driver(make(), max_num_seqs=8, speculative="ngram")
    [request_id] = driver.add(prompt, 20, logprobs=1, stop_token_ids=(stop,))
    entries: list[TokenLogprobs] = []
    while request_id not in driver.ends:
        for output in driver.step():
            entries += output.logprobs or []
    tokens, wanted = alone(prompt, 20, 0, [0], logprobs=1)
    end = tokens.index(stop) + 1
    assert (driver.tokens[request_id], entries) == (tokens[:end], wanted[:end])


def test_guesses_that_run_into_nan() -> None:
    runner = make()
    runner.submit(SchedulerOutput([new(1, [0, 1])], [1], [2], [0]))
    [[token]] = runner.collect().sampled_token_ids
    step = SchedulerOutput([], [1], [3], [2])
    step.drafts[1] = [int(np.nanargmax(logits_after([0, 1, token], [0]))), POISON]
    runner.submit(step)
    result = runner.collect()
    # The guess that was right leads to a token that is not the poison: nobody looks at what follows it.
    assert result.failed == {}
    assert len(result.sampled_token_ids[0]) == 2


@pytest.mark.parametrize(
    ("allowed", "guesses", "error"),
    [((2,), [2], InvalidRequestError), ((2, POISON), [POISON], NumericalError)],
    ids=["nothing is allowed", "NaN behind a guess that is right"],
)
def test_why_nothing_could_be_sampled_among_guesses(allowed: tuple[int, ...], guesses: list[int], error: type) -> None:
    runner = make()
    params = SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=allowed, bad_words=((2, 2),))
    runner.submit(SchedulerOutput([new(1, [0, 1], params=params)], [1], [2], [0]))
    assert runner.collect().sampled_token_ids == [[2]]
    runner.submit(SchedulerOutput([], [1], [2], [2], drafts={1: guesses}))
    assert type(runner.collect().failed[1]) is error


def test_an_adapter_that_is_not_loaded() -> None:
    driver = Driver(make(), max_num_seqs=8)
    [lost], [known], [plain] = driver.add([1], 4, adapter="b"), driver.add([1], 4, adapter="a"), driver.add([1], 4)
    driver.run()
    assert driver.tokens[lost] == []
    error = driver.ends[lost].error
    assert (error.code, error.message) == ("model_not_found", "the adapter 'b' is not loaded in this engine")
    assert driver.tokens[known] == driver.tokens[plain] == alone([1], 4, 0, [0])[0]


def test_steps_of_the_same_requests_go_on_into_blocks_that_they_had_before() -> None:
    runner, prompt = make(), [1, 2, 0]
    runner.submit(SchedulerOutput([new(1, prompt)], [1], [3], [0]))
    [tokens] = runner.collect().sampled_token_ids
    for position in range(3, 8):  # blocks have four positions
        runner.submit(SchedulerOutput([], [1], [1], [position], total_num_scheduled_tokens=1))
        tokens += runner.collect().sampled_token_ids[0]
    assert tokens == alone(prompt, 6, 0, [0])[0]


def test_vectors_come_beside_tokens() -> None:
    runner = make()
    vector = new(1, [1, 2, 3, 1, 2], params=PoolingParams())
    runner.submit(SchedulerOutput([vector, new(2, [4])], [1, 2], [3, 1], [0, 0]))
    runner.submit(SchedulerOutput([], [1, 2], [2, 1], [3, 1]))
    first, second = runner.collect(), runner.collect()
    assert first.pooled == {}
    assert second.pooled == {1: [5.0, 9.0]}
    assert [len(tokens) for tokens in first.sampled_token_ids] == [0, 1]
    assert [len(tokens) for tokens in second.sampled_token_ids] == [0, 1]


def test_blocks_are_copied_after_the_step_before_has_written_them() -> None:
    runner = make(lazy=True)
    runner.submit(SchedulerOutput([new(1, [1, 2, 3])], [1], [3], [0]))
    copied = new(2, [1, 2, 3], block_ids=([30],))
    runner.submit(SchedulerOutput([copied], [2], [1], [2], block_copies=[(1, 30)]))
    assert runner.collect().sampled_token_ids == runner.collect().sampled_token_ids


def test_after_a_failure_requests_are_told_again() -> None:
    runner = make()
    driver = Driver(runner, max_num_seqs=8)
    ids = [*driver.add([1, 2], 12), *driver.add([3, 3, 3], 12)]
    driver.step()
    runner._model.fails = True  # type: ignore[attr-defined]
    driver.run()
    assert [driver.tokens[i] for i in ids] == [alone([1, 2], 12, 0, [0])[0], alone([3, 3, 3], 12, 0, [0])[0]]
    assert driver.stats.step_failures == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_cannot_be_started_harms_none_before_it(depth: int) -> None:
    runner = make(num_buffers=depth)
    driver = Driver(runner, max_num_seqs=8, steps_in_flight=depth)
    runner._model.refused_slot = 1  # type: ignore[attr-defined]
    [innocent] = driver.add([1, 2], 12)
    driver.step()
    [guilty] = driver.add([3, 3], 12, adapter="a")
    driver.run()
    assert driver.tokens[innocent] == alone([1, 2], 12, 0, [0])[0]
    assert driver.tokens[guilty] == []
    assert driver.ends[guilty].error.code == "step_failed"
    assert not driver.core.broken


def test_a_step_starts_behind_one_with_nothing_to_compute() -> None:
    runner = make()
    runner.submit(SchedulerOutput([new(1, [1, 2], adapter="b")], [1], [2], [0]))
    runner.submit(SchedulerOutput([new(2, [1, 2])], [2], [2], [0]))
    assert set(runner.collect().failed) == {1}
    assert runner.collect().sampled_token_ids == [alone([1, 2], 1, 0, [0])[0]]


def test_a_reset_forgets_everybody() -> None:
    runner = make()
    for first in (0, 16):
        runner.submit(SchedulerOutput([new(i, [1]) for i in range(first, first + 16)]))
        runner.reset()


def test_more_requests_than_rows() -> None:
    runner = make()
    with pytest.raises(EngineError, match="request 16 is one more than the 16 that there is room for"):
        runner.submit(SchedulerOutput([new(i, [1]) for i in range(17)]))


def new(request_id: int, token_ids: list[int], **changes: Any) -> NewRequest:
    """Its tokens are all prompt, in blocks that are its own."""
    values: dict[str, Any] = {
        "num_prompt_tokens": len(token_ids),
        "block_ids": ([request_id, request_id + 10],),
        "params": SamplingParams(max_tokens=9, temperature=0.0),
        "seed": 0,
    }
    return NewRequest(request_id, token_ids, **{**values, **changes})
