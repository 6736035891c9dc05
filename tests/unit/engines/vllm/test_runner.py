"""What the vLLM runner adds to the suite of all engines: sampling under preemption, grammars, failures, adapters."""

from __future__ import annotations

import numpy as np
import pytest

from helpers_engine import Driver

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


@pytest.mark.parametrize("caching", [False, True])
def test_sampling_survives_preemption_and_chunks(runner, caching):
    expected = [alone(runner, prompt(n), 80, **params) for n, params in enumerate(SAMPLING)]
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=caching)
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


def test_a_grammar_rules_only_its_request(runner):
    allowed = {30, 31, 32, 383}
    mask = np.zeros(12, np.int32)
    for token in allowed:
        mask[token // 32] |= np.int32(np.uint32(1 << token % 32).astype(np.int32))
    free = alone(runner, prompt(3), 20)
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=30)
    [ruled], [other] = driver.add(prompt(5), 20), driver.add(prompt(3), 20)
    asked = []

    def bitmasks(ids):
        asked.append(list(ids))
        return {ruled: mask} if ruled in ids else {}

    runner.bitmasks = bitmasks
    try:
        driver.run()
    finally:
        runner.bitmasks = None
    assert set(driver.tokens[ruled]) <= allowed
    assert driver.tokens[other] == free
    assert asked[0] == []  # nobody's prompt was computed yet


def test_an_adapter_that_is_not_there_is_refused_by_name(runner):
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    [neighbour], [poet] = driver.add(prompt(1), 10), driver.add(prompt(2), 10, adapter="poet")
    driver.run()
    assert "no LoRA adapter is loaded as 'poet'" in driver.ends[poet].error.message
    assert driver.tokens[neighbour] == alone(runner, prompt(1), 10)


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_after_a_failed_step_the_runner_goes_on(runner, monkeypatch, method):
    expected = alone(runner, prompt(6), 20)
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=256)
    victims = [driver.add(prompt(n), 30)[0] for n in range(3)]
    for _ in range(4):
        driver.step()

    def broken(*arguments, **options):
        raise RuntimeError("the device fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(runner._executor, method, broken, raising=False)
        patch.setattr(runner, "reset", lambda: None)
        driver.step()
    runner.reset()
    assert all(driver.ends[i].error.code == "step_failed" for i in victims)
    [request] = driver.add(prompt(6), 20)
    driver.run()
    assert driver.tokens[request] == expected


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
