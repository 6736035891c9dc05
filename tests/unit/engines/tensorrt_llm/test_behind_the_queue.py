"""The engine behind our admission queue: who waits, who ends, what is given back.

The conformance suite asks for more than TensorRT-LLM offers (logprobs of prompts, seeds, preemptions that are told);
what of it applies is asked here.
"""

from __future__ import annotations

import random

import pytest

from penstock.engines.contract.core import Core
from penstock.engines.contract.messages import FinishReason
from support.engine import Driver
from support.tensorrt_llm import BLOCK, greedy


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


@pytest.fixture
def drive(make):
    def drive_one(faults=None, options=None, **scheduler):
        engine = make(faults, **options or {})
        driver = Driver(engine.batcher, **{"max_num_seqs": 8} | scheduler)
        driver.llm = engine.llm
        return driver

    return drive_one


def test_it_is_a_core(drive):
    core: Core = drive().core
    assert core.wakeups
    assert not core.has_work


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_single_request(drive, length):
    driver = drive()
    [request] = driver.add(prompt(length), 24)
    driver.run()
    assert driver.tokens[request] == greedy(prompt(length), 24)
    assert driver.ends[request].finish_reason is FinishReason.LENGTH


def test_more_requests_than_seats_and_blocks(drive):
    driver = drive()
    asked = {driver.add(prompt(40 + 3 * n, n), 60)[0]: prompt(40 + 3 * n, n) for n in range(30)}
    most = 0

    def look():
        nonlocal most
        most = max(most, driver.llm.num_active)
        return False

    driver.run(look)
    assert most <= 8
    for request, tokens in asked.items():
        assert driver.tokens[request] == greedy(tokens, 60)
    stats = driver.stats
    assert stats.num_free_blocks == stats.num_blocks == 24
    assert stats.finished == {"length": 30}
    assert stats.num_running == stats.num_waiting == 0


def test_parallel_samples(drive):
    driver = drive()
    ids = driver.add(prompt(50), 20, n=4)
    driver.run()
    assert all(driver.tokens[request] == greedy(prompt(50), 20) for request in ids)


@pytest.mark.parametrize("shared", [BLOCK, 2 * BLOCK, 2 * BLOCK + 5])
def test_prefix_hits_are_counted(drive, shared):
    driver = drive(enable_prefix_caching=True)
    for n in range(3):
        [request] = driver.add(prompt(shared) + prompt(9, 10 + n), 12)
        driver.run()
        assert driver.tokens[request] == greedy(prompt(shared) + prompt(9, 10 + n), 12)
    assert driver.stats.prefix_hits == 2 * (shared // BLOCK * BLOCK)


def test_aborts_leave_the_others_alone_and_nothing_behind(drive):
    driver = drive()
    asked = {driver.add(prompt(45, n % 3), 60)[0]: prompt(45, n % 3) for n in range(20)}
    rng = random.Random(1)

    def abort_some():
        if rng.random() < 0.3:
            driver.abort(rng.choice(list(asked)))
        return False

    driver.run(abort_some)
    reasons = {end.finish_reason for end in driver.ends.values()}
    assert reasons == {FinishReason.ABORT, FinishReason.LENGTH}
    for request, tokens in asked.items():
        got = driver.tokens[request]
        assert got == greedy(tokens, 60)[: len(got)]
    assert driver.llm.num_active == 0
    assert driver.stats.num_running == 0


def test_a_request_that_the_engine_cannot_run_as_asked_is_refused(drive):
    driver = drive()
    [refused] = driver.add(prompt(5), 4, prompt_logprobs=1)
    [served] = driver.add(prompt(5), 4, logprobs=2)
    driver.run()
    assert driver.ends[refused].error.code == "unsupported_parameter"
    assert driver.tokens[served] == greedy(prompt(5), 4)


def test_an_unanswered_abort_keeps_its_seat(drive):
    driver = drive({"abort": "ignored"}, {"max_num_seqs": 1}, max_num_seqs=1)
    [stuck] = driver.add(prompt(5), 300)
    [waits] = driver.add(prompt(6), 3)
    driver.run(lambda: driver.tokens[stuck])
    driver.abort(stuck)
    driver.step()
    assert driver.ends[stuck].finish_reason is FinishReason.ABORT
    assert (driver.stats.num_running, driver.stats.num_waiting) == (1, 1)
    driver.run()  # it runs on to its own end
    assert driver.tokens[waits] == greedy(prompt(6), 3)


def test_a_dead_engine_ends_its_requests(drive):
    driver = drive()
    ids = [driver.add(prompt(5 + n), 400)[0] for n in range(3)]
    driver.run(lambda: all(driver.tokens[i] for i in ids))
    driver.llm.die(RuntimeError("a worker is gone"))
    driver.run(lambda: driver.core.broken)
    assert [driver.ends[i].error.code for i in ids] == ["step_failed"] * 3
