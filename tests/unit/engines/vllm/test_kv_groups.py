"""Groups of KV cache under our scheduler: layers with a window beside layers with full attention, token by token."""

from __future__ import annotations

import pytest

from penstock.engines.contract.loading import silent
from penstock.engines.registry import RUNNERS
from penstock.kvcache import KVGroup
from support.engine import Driver
from support.models import load_reference, reference_tokens


def prompt(n, length=90):
    return [3 + (7 * n + 11 * i + i * i) % 250 for i in range(length)]


@pytest.fixture(scope="session")
def windows(windows_dir):
    """Until the end: vLLM's process groups are one for all runners of a process, and `close` ends them."""
    options = {"model_dir": str(windows_dir), "dtype": "f32", "num_blocks": 40, "max_num_seqs": 8}
    runner = RUNNERS["vllm"](options | {"max_num_batched_tokens": 128}, silent)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(windows_dir):
    reference, known = load_reference(windows_dir), {}

    def tokens(asked, count):
        key = (*asked, count)
        if key not in known:
            known[key] = reference_tokens(reference, asked, count)
        return known[key]

    return tokens


def test_what_it_says_of_its_groups(windows):
    info = windows.info
    assert info.kv_groups == (KVGroup(32, 40), KVGroup(32, 40), KVGroup(32))
    assert info.num_blocks == 40
    assert info.runner.startswith("vllm 0.3")


@pytest.mark.parametrize("budget", [9, 33, 128])
def test_windows_and_full_attention(windows, expected, budget):
    driver = Driver(windows, max_num_seqs=4, max_num_batched_tokens=budget)
    asked = {driver.add(prompt(n, 20 + 40 * n), 50)[0]: prompt(n, 20 + 40 * n) for n in range(4)}
    driver.run()
    for request, tokens in asked.items():
        assert driver.tokens[request] == expected(tokens, 50)
    assert len(set(expected(prompt(1, 60), 50))) > 10


def test_what_lies_behind_a_window_goes_to_others(windows, expected):
    """Three tables of a whole request would be 3 * 10 blocks."""
    driver = Driver(windows, max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    [request] = driver.add(prompt(1), 220)
    most = 0
    while driver.has_work or not driver.ends:
        driver.step()
        stats = driver.stats
        most = max(most, stats.num_blocks - stats.num_free_blocks)
    assert driver.tokens[request] == expected(prompt(1), 220)
    assert most <= 10 + 2 * 4


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_say_the_same_with_and_without_caching(windows, expected, caching):
    driver = Driver(windows, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=caching)
    asked = {driver.add(prompt(n, 60 + n), 90)[0]: prompt(n, 60 + n) for n in range(8)}
    driver.run()
    assert driver.stats.preemptions > 0
    for request, tokens in asked.items():
        assert driver.tokens[request] == expected(tokens, 90)


def test_prefix_hits_and_forks(windows, expected):
    driver = Driver(windows, max_num_seqs=8, max_num_batched_tokens=128)
    for tail in (1, 2):
        asked = prompt(1, 128) + prompt(tail, 9)
        ids = driver.add(asked, 40, n=2)
        driver.run()
        for request in ids:
            assert driver.tokens[request] == expected(asked, 40)
    assert driver.stats.prefix_hits >= 128


def test_broken_logits_end_their_request_alone(windows, expected):
    embedding = windows._executor.driver_worker.worker.model_runner.model.model.embed_tokens.weight.data
    kept = embedding[260].clone()
    embedding[260] = float("nan")
    try:
        driver = Driver(windows, max_num_seqs=8, max_num_batched_tokens=64)
        [broken], [good] = driver.add([*prompt(2, 70), 260, *prompt(2)], 40), driver.add(prompt(1), 40)
        driver.run()
    finally:
        embedding[260] = kept
    assert driver.ends[broken].error.code == "numerical_error"
    assert driver.tokens[good] == expected(prompt(1), 40)
    for _ in range(4):  # whatever blocks they get: nothing is left in them that could spread
        ids = [driver.add(prompt(n, 70), 40)[0] for n in range(3)]
        driver.run()
        assert [driver.tokens[i] for i in ids] == [expected(prompt(n, 70), 40) for n in range(3)]
