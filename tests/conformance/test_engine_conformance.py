"""What every engine must do, whatever runs its matrices: greedy tokens do not depend on how they were computed."""

from __future__ import annotations

import itertools
import random

import pytest

from helpers_engine import Driver
from penstock.engines.contract.messages import FinishReason

BLOCK = 32


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def driver_of(candidate, **scheduler):
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    candidate.forget()
    return Driver(candidate.engine, **defaults | scheduler)


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_single_request(candidate, length):
    driver = driver_of(candidate)
    [request] = driver.add(prompt(length), 24)
    driver.run()
    assert driver.tokens[request] == candidate.expect(prompt(length), 24)
    assert driver.ends[request].finish_reason is FinishReason.LENGTH


def test_a_batch_of_different_lengths(candidate):
    driver = driver_of(candidate)
    asked = {driver.add(prompt(5 + 11 * n, n), 8 + n)[0]: (prompt(5 + 11 * n, n), 8 + n) for n in range(7)}
    driver.run()
    for request, (tokens, count) in asked.items():
        assert driver.tokens[request] == candidate.expect(tokens, count)


def test_requests_that_join_while_others_decode(candidate):
    driver = driver_of(candidate)
    asked = {}
    for n in range(6):
        asked[driver.add(prompt(20 + n, n), 16)[0]] = prompt(20 + n, n)
        driver.step()
        driver.step()
    driver.run()
    for request, tokens in asked.items():
        assert driver.tokens[request] == candidate.expect(tokens, 16)


@pytest.mark.parametrize("budget", [3, 7, 32, 33])
def test_chunked_prefill_beside_decodes(candidate, budget):
    if not hasattr(candidate.engine, "execute"):
        pytest.skip("how its steps are cut is the engine's own affair")
    driver = driver_of(candidate, max_num_seqs=3, max_num_batched_tokens=budget)
    asked = {driver.add(prompt(70 + n, n), 12)[0]: prompt(70 + n, n) for n in range(3)}
    driver.run()
    for request, tokens in asked.items():
        assert driver.tokens[request] == candidate.expect(tokens, 12)


@pytest.mark.parametrize("shared", [BLOCK, 2 * BLOCK, 2 * BLOCK + 5])
def test_prefix_hits(candidate, shared):
    driver = driver_of(candidate, enable_prefix_caching=True)
    stem = prompt(shared)
    for n in range(3):
        tokens = stem + prompt(9, 10 + n)
        [request] = driver.add(tokens, 12)
        driver.run()
        assert driver.tokens[request] == candidate.expect(tokens, 12)
    assert driver.stats.prefix_hits == 2 * (shared // BLOCK * BLOCK)


def test_a_hit_on_the_whole_prompt(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True)
    for _ in range(3):
        [request] = driver.add(prompt(2 * BLOCK), 12)
        driver.run()
        assert driver.tokens[request] == candidate.expect(prompt(2 * BLOCK), 12)
    assert driver.stats.prefix_hits == 2 * (BLOCK if candidate.whole_block_hits else 2 * BLOCK - 1)


def test_an_answer_that_becomes_a_prompt_is_found_in_the_cache(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True)
    [first] = driver.add(prompt(20), 50)
    driver.run()
    longer = prompt(20) + driver.tokens[first]
    [second] = driver.add(longer, 10)
    driver.run()
    assert driver.tokens[second] == candidate.expect(longer, 10)
    assert driver.stats.prefix_hits == 2 * BLOCK


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_and_resumption(candidate, caching):
    driver = driver_of(candidate, enable_prefix_caching=caching)
    asked = {driver.add(prompt(40 + n, n), 90)[0]: prompt(40 + n, n) for n in range(8)}
    driver.run()
    assert driver.stats.preemptions > 0
    for request, tokens in asked.items():
        assert driver.tokens[request] == candidate.expect(tokens, 90)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_forked_samples_share_the_prompt_and_part_ways_in_peace(candidate, length):
    driver = driver_of(candidate)
    ids = driver.add(prompt(length), 40, n=4)
    driver.run()
    for request in ids:
        assert driver.tokens[request] == candidate.expect(prompt(length), 40)


def test_forks_beside_strangers_under_pressure(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True, max_num_seqs=6, max_num_batched_tokens=48)
    asked = {}
    for n in range(3):
        asked |= dict.fromkeys(driver.add(prompt(50, n), 60, n=3), prompt(50, n))
        asked |= dict.fromkeys(driver.add(prompt(50, n) + prompt(20, 9), 60), prompt(50, n) + prompt(20, 9))
    driver.run()
    for request, tokens in asked.items():
        assert driver.tokens[request] == candidate.expect(tokens, 60)


def test_aborts_leave_the_others_alone(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True, max_num_batched_tokens=32)
    asked = {driver.add(prompt(45, n % 3), 30)[0]: prompt(45, n % 3) for n in range(9)}
    rng = random.Random(1)
    while driver.has_work or not driver.ends:
        driver.step()
        if rng.random() < 0.1:
            driver.abort(rng.choice(list(asked)))
    for request, tokens in asked.items():
        got = driver.tokens[request]
        assert got == candidate.expect(tokens, 30)[: len(got)]
        if driver.ends[request].finish_reason is not FinishReason.ABORT:
            assert len(got) == 30


def test_logprobs_do_not_change_tokens(candidate):
    if not candidate.engine.info.supports_logprobs:
        pytest.skip("it has no distribution")
    driver = driver_of(candidate)
    [request] = driver.add(prompt(30), 10, logprobs=3, prompt_logprobs=1)
    outputs = []
    while driver.has_work or not outputs:
        outputs += driver.step()
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    assert driver.tokens[request] == candidate.expect(prompt(30), 10) == [entry.token_id for entry in entries]
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id and len(entry.top) == 3 for entry in entries)
    [info] = [output.prompt for output in outputs if output.prompt is not None]
    assert [entry.token_id for entry in info.logprobs] == prompt(30)[1:]


def test_seeded_samples_do_not_depend_on_their_neighbours(candidate):
    sampling = {"temperature": 1.0, "seed": 11, "top_p": 0.9, "top_k": 50}
    alone = driver_of(candidate)
    expected = [alone.add(prompt(40), 30, n=2, **sampling)]
    alone.run()
    crowded = driver_of(candidate, enable_prefix_caching=True, max_num_batched_tokens=20)
    for n in range(4):
        crowded.add(prompt(60, n), 70)
    ids = crowded.add(prompt(40), 30, n=2, **sampling)
    crowded.run()
    assert [crowded.tokens[i] for i in ids] == [alone.tokens[i] for i in expected[0]]


def test_stop_tokens_and_minimum_lengths(candidate):
    tokens = candidate.expect(prompt(25), 20)
    stop = tokens[5]
    driver = driver_of(candidate)
    [request] = driver.add(prompt(25), 20, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens[request] == tokens[: tokens.index(stop) + 1]
    assert driver.ends[request].finish_reason is FinishReason.STOP
    assert driver.ends[request].stop_token_id == stop


def test_everything_is_given_back(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True)
    for n in range(12):
        driver.add(prompt(30 + n, n), 20, n=1 + n % 3)
    driver.run()
    stats = driver.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.admitted == sum(stats.finished.values())


_loads = itertools.count(1)


@pytest.fixture
def adapters(candidate):
    """Two that are loaded, and the base model: by the key of their requests, what they give."""
    if candidate.adapter is None:
        pytest.skip("it has no LoRA adapters")
    expected = {"": candidate.expect}
    for name in ("first", "second"):
        key = f"{name}:{next(_loads)}"
        folder, expected[key] = candidate.adapter(key)
        candidate.engine.load_adapter(key, folder)
    yield expected
    for key in expected.keys() - {""}:
        candidate.engine.unload_adapter(key)


@pytest.mark.parametrize("budget", [9, 40, 256])
def test_adapters_and_the_base_model_in_one_batch(candidate, adapters, budget):
    driver = driver_of(candidate, max_num_seqs=9, max_num_batched_tokens=budget)
    asked = {}
    for n in range(3):
        for key in adapters:
            asked |= dict.fromkeys(driver.add(prompt(20 + 17 * n, n), 14, n=1 + n % 2, adapter=key), (key, n))
    driver.run()
    for request, (key, n) in asked.items():
        assert driver.tokens[request] == adapters[key](prompt(20 + 17 * n, n), 14)
    assert len({tuple(expect(prompt(20), 14)) for expect in adapters.values()}) == 3


def test_adapters_share_no_blocks(candidate, adapters):
    driver = driver_of(candidate, enable_prefix_caching=True)
    hits = []
    for key in [*adapters, *adapters]:
        [request] = driver.add(prompt(2 * BLOCK + 5), 8, adapter=key)
        driver.run()
        assert driver.tokens[request] == adapters[key](prompt(2 * BLOCK + 5), 8)
        hits.append(driver.stats.prefix_hits // BLOCK)
    assert hits == [0, 0, 0, 2, 4, 6]


def test_preemption_among_adapters(candidate, adapters):
    driver = driver_of(candidate, enable_prefix_caching=True)
    asked = {}
    for n, key in enumerate([*adapters] * 3):
        asked[driver.add(prompt(40 + n, n), 80, adapter=key)[0]] = (key, n)
    driver.run()
    assert driver.stats.preemptions > 0
    for request, (key, n) in asked.items():
        assert driver.tokens[request] == adapters[key](prompt(40 + n, n), 80)


def test_an_adapter_is_replaced_while_others_run(candidate, adapters):
    """The same weights under another key: nothing of what the old key has cached is used."""
    driver = driver_of(candidate, enable_prefix_caching=True)
    _, stays, old = adapters
    [running] = driver.add(prompt(30, 1), 60, adapter=stays)
    [before] = driver.add(prompt(3 * BLOCK), 4, adapter=old)
    driver.run(until=lambda: before in driver.ends)
    candidate.engine.unload_adapter(old)
    new = f"second:{next(_loads)}"
    folder, expect = candidate.adapter(new)
    candidate.engine.load_adapter(new, folder)
    [after] = driver.add(prompt(3 * BLOCK), 4, adapter=new)
    driver.run(until=lambda: after in driver.ends)
    if driver.core.wakeup is None:  # one that runs by itself does not wait for anybody
        assert running not in driver.ends
    driver.run()
    candidate.engine.unload_adapter(new)
    assert driver.tokens[before] == adapters[old](prompt(3 * BLOCK), 4)
    assert driver.tokens[after] == expect(prompt(3 * BLOCK), 4)
    assert driver.tokens[running] == adapters[stays](prompt(30, 1), 60)
    assert driver.stats.prefix_hits == 0
