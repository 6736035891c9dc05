"""What the vLLM runner adds to the suite of all engines: sampling under preemption, steps under way, failures."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.step import NewRequest, SchedulerOutput
from penstock.engines.errors import EngineError
from support.engine import Driver

SAMPLING = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4},
    {"min_tokens": 50, "stop_token_ids": tuple(range(3, 200))},
    {"temperature": 0.7, "seed": 1, "presence_penalty": 1.0, "logit_bias": {20: 2.0}},
]


def prompt(n, length=50):
    return [3 + (7 * n + 11 * i + i * i) % 250 for i in range(length)]


def alone(runner, tokens, count, **params):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    [request] = driver.add(tokens, count, **params)
    driver.run()
    return driver.tokens[request]


@pytest.mark.parametrize(("caching", "depth"), [(False, 1), (False, 2), (True, 2)])
def test_sampling_survives_preemption_and_chunks(runner, caching, depth):
    expected = [alone(runner, prompt(n), 80, **params) for n, params in enumerate(SAMPLING)]
    driver = Driver(
        runner, max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=caching, steps_in_flight=depth
    )
    strangers = [driver.add(prompt(20 + n), 120)[0] for n in range(2)]
    ids = [driver.add(prompt(n), 80, **params)[0] for n, params in enumerate(SAMPLING)]
    driver.run()
    assert driver.stats.preemptions > 0
    assert [driver.tokens[i] for i in ids] == expected
    assert all(len(driver.tokens[i]) == 120 for i in strangers)


def test_stop_tokens_wait_for_min_tokens(runner):
    tokens = alone(runner, prompt(4), 80, **SAMPLING[4])
    assert len(tokens) > 50
    assert all(token >= 200 or token < 3 for token in tokens[:50])


def test_parameters_that_vllm_does_not_take_end_their_request_alone(runner):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    [hot], [neighbour] = driver.add(prompt(1), 10, temperature=3.0), driver.add(prompt(2), 10)
    driver.run()
    assert "temperature must be in" in driver.ends[hot].error.message
    assert driver.ends[hot].error.code == "invalid_request"
    assert driver.tokens[neighbour] == alone(runner, prompt(2), 10)


def test_seeds_make_the_difference(runner):
    first, again, other = (alone(runner, prompt(1), 30, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_truncation_keeps_to_the_likeliest(runner):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    driver.add(prompt(2), 40, temperature=2.0, seed=1, top_k=4, logprobs=4)
    entries = []
    while not driver.ends:
        entries += [entry for output in driver.step() for entry in output.logprobs or ()]
    assert len(entries) == 40
    assert all(entry.rank <= 4 and entry.token_id in dict(entry.top) for entry in entries)
    assert len({entry.rank for entry in entries}) > 1


def test_logprobs_of_different_widths_share_a_batch(runner):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=48)
    widths = {driver.add(prompt(n), 12, logprobs=k)[0]: k for n, k in enumerate((None, 0, 5, 2))}
    scored = driver.add(prompt(9, 70), 12, prompt_logprobs=3)[0]
    found = {i: [] for i in widths}
    while len(driver.ends) < 5:
        for output in driver.step():
            if output.id in widths:
                found[output.id] += output.logprobs or []
            elif output.prompt is not None:
                entries = output.prompt.logprobs
    for request, width in widths.items():
        assert [len(entry.top) for entry in found[request]] == ([] if width is None else [width] * 12)
    assert [entry.token_id for entry in entries] == prompt(9, 70)[1:]
    assert all(len(entry.top) == 3 for entry in entries)
    assert driver.tokens[scored] == alone(runner, prompt(9, 70), 12)


def test_an_adapter_that_is_not_there_is_refused_by_name(runner):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    [neighbour], [poet] = driver.add(prompt(1), 10), driver.add(prompt(2), 10, adapter="poet")
    driver.run()
    assert "no LoRA adapter is loaded as 'poet'" in driver.ends[poet].error.message
    assert driver.ends[poet].error.code == "model_not_found"
    assert driver.tokens[neighbour] == alone(runner, prompt(1), 10)


def fail_steps(runner, patch, method, fails):
    """The executor's method raises in steps for which `fails` holds, which is given vLLM's SchedulerOutput."""
    execute, original = runner._executor.execute_model, getattr(runner._executor, method)
    steps = []

    def watched(output, **options):
        steps.append(output)
        return broken(output, **options) if method == "execute_model" else execute(output, **options)

    def broken(*arguments, **options):
        if fails(steps[-1]):
            raise RuntimeError("the device fell off the bus")
        return original(*arguments, **options)

    patch.setattr(runner._executor, method, broken)
    patch.setattr(runner._executor, "execute_model", watched)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_a_step_that_fails_once_costs_nobody_a_token(runner, monkeypatch, method, depth):
    asked = [prompt(n, 40 + 9 * n) for n in range(len(SAMPLING))]
    expected = [alone(runner, tokens, 30, **params) for tokens, params in zip(asked, SAMPLING, strict=True)]
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=64, steps_in_flight=depth)
    ids = [driver.add(tokens, 30, **params)[0] for tokens, params in zip(asked, SAMPLING, strict=True)]
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        fail_steps(runner, patch, method, lambda output: output.num_scheduled_tokens and next(calls) in (3, 12))
        driver.run()
    assert driver.stats.step_failures == 2
    assert [driver.tokens[i] for i in ids] == expected


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_of_a_step_that_fails_only_the_guilty_request_ends(runner, monkeypatch, method):
    expected = [alone(runner, prompt(n), 20, **params) for n, params in enumerate(SAMPLING[:3])]
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    ids = [driver.add(prompt(n), 20, **params)[0] for n, params in enumerate(SAMPLING[:3])]
    for _ in range(4):
        driver.step()
    [guilty] = driver.add(prompt(9), 20)
    with monkeypatch.context() as patch:

        def is_guilty(output):
            return prompt(9) in [new.prompt_token_ids for new in output.scheduled_new_reqs]

        fail_steps(runner, patch, method, is_guilty)
        driver.run()
    assert driver.ends[guilty].error.code == "step_failed"
    assert [driver.tokens[i] for i in ids] == expected
    assert alone(runner, prompt(9), 20)


def test_a_step_builds_on_tokens_that_are_still_to_be_sampled(runner):
    runner.reset()
    expected = alone(runner, prompt(3), 3)
    runner.reset()
    params = SamplingParams(max_tokens=3, temperature=0)
    first = SchedulerOutput([NewRequest(7, prompt(3), 50, ([3, 5],), params, 0)], [7], [50], [0])
    runner.submit(first)
    runner.submit(SchedulerOutput([], [7], [1], [50]))
    assert runner.collect().sampled_token_ids == [expected[:1]]
    runner.submit(SchedulerOutput([], [7], [1], [51]))
    assert [runner.collect().sampled_token_ids for _ in range(2)] == [[expected[1:2]], [expected[2:]]]


class Late(Future):
    """A result that is there only when it is asked for, as with vLLM's asynchronous scheduling."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    def result(self, timeout=None):
        return self.outcome()


def test_results_that_come_late(runner, monkeypatch):
    expected = [alone(runner, prompt(n), 20, **params) for n, params in enumerate(SAMPLING)]
    sample = runner._executor.sample_tokens
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=64)
    ids = [driver.add(prompt(n), 20, **params)[0] for n, params in enumerate(SAMPLING)]
    calls = iter(range(1000))

    def late(*arguments, **options):
        found = sample(*arguments, **options)
        fails = next(calls) == 9

        def outcome():
            if fails:
                raise RuntimeError("the device fell off the bus")
            return found.result()

        return Late(outcome)

    with monkeypatch.context() as patch:
        patch.setattr(runner._executor, "sample_tokens", late)
        driver.run()
    assert driver.stats.step_failures == 1
    assert [driver.tokens[i] for i in ids] == expected


def test_scores_that_a_failed_step_has_lost_are_told(runner, monkeypatch):
    expected = alone(runner, prompt(2), 10)
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=40)
    [scored] = driver.add(prompt(1, 150), 10, prompt_logprobs=1)
    [neighbour] = driver.add(prompt(2), 10)
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        fail_steps(runner, patch, "execute_model", lambda output: output.num_scheduled_tokens and next(calls) == 2)
        driver.run()
    assert "logprobs of this prompt" in driver.ends[scored].error.message
    assert driver.ends[scored].error.code == "step_failed"
    assert driver.tokens[neighbour] == expected


def test_what_was_handed_out_behind_a_failed_step_is_not_computed(runner, monkeypatch):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    driver.add(prompt(1), 30)
    driver.step()
    asked = []

    def broken(output, **options):
        asked.append(output)
        raise RuntimeError("the device fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(runner._executor, "execute_model", broken)
        steps = [SchedulerOutput([], [1], [1], [50 + n]) for n in (1, 2)]
        runner.collect()
        for step in steps:
            runner.submit(step)
        for _ in steps:
            with pytest.raises((RuntimeError, EngineError), match=r"fell off|a step before this one failed"):
                runner.collect()
    assert len(asked) == 1
    runner.reset()


def test_broken_logits_end_their_request_alone(runner):
    expected = alone(runner, prompt(7), 40)
    embedding = runner._executor.driver_worker.worker.model_runner.model.model.embed_tokens.weight.data
    kept = embedding[260].clone()
    embedding[260] = float("nan")
    try:
        driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
        [broken], [good] = driver.add([260, *prompt(8)], 40), driver.add(prompt(7), 40)
        driver.run()
    finally:
        embedding[260] = kept
    assert driver.ends[broken].error.code == "numerical_error"
    assert driver.tokens[good] == expected
    for _ in range(6):  # whatever blocks they get: nothing is left in them that could spread
        [request] = driver.add(prompt(7), 40)
        driver.run()
        assert driver.tokens[request] == expected


def test_what_it_says_of_itself(runner):
    info = runner.info
    assert (info.vocab_size, info.max_model_len, info.block_size, info.num_blocks) == (384, 512, 32, 24)
    assert info.eos_token_ids == (2,)
    assert info.runner.startswith("vllm 0.3")
