"""What every engine must do, whatever runs its matrices: greedy tokens do not depend on how they were computed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from penstock.engines.contract.messages import (
    AddRequest,
    FinishReason,
    PoolingParams,
    ProcessorCall,
    SamplingParams,
)
from penstock.engines.kit.sampling import processors
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.guessers import PromptLookup
from support.adapters import load_adapter
from support.conformance import Oracle, driver_of, prompt
from support.engine import Driver, Failing
from support.inline_engine import InlineEngine

BLOCK = 32


def check_greedy(driver: Driver, request: int, oracle: Oracle, tokens: Sequence[int], count: int) -> None:
    """A greedy request with the prompt `tokens` has put out what the oracle expects."""
    said = driver.tokens[request]
    assert said == oracle(tokens, count, guess=said)


@pytest.mark.every_family(length=(1, BLOCK + 1, 3 * BLOCK))
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_single_request(candidate, length):
    driver = driver_of(candidate)
    [request] = driver.add(prompt(length), 24)
    driver.run()
    check_greedy(driver, request, candidate.expect, prompt(length), 24)
    assert driver.ends[request].finish_reason is FinishReason.LENGTH


@pytest.mark.every_family
def test_a_batch_of_different_lengths(candidate):
    driver = driver_of(candidate)
    asked = {driver.add(prompt(5 + 11 * n, n), 8 + n)[0]: (prompt(5 + 11 * n, n), 8 + n) for n in range(7)}
    driver.run()
    for request, (tokens, count) in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, count)


def test_requests_that_join_while_others_decode(candidate):
    driver = driver_of(candidate)
    asked = {}
    for n in range(6):
        asked[driver.add(prompt(20 + n, n), 16)[0]] = prompt(20 + n, n)
        driver.step()
        driver.step()
    driver.run()
    for request, tokens in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, 16)


@pytest.mark.every_family(budget=(7, 33))
@pytest.mark.parametrize("budget", [3, 7, 32, 33])
def test_chunked_prefill_beside_decodes(candidate, budget):
    candidate.needs("our scheduler")  # else how its steps are cut is the engine's own affair
    driver = driver_of(candidate, max_num_seqs=3, max_num_batched_tokens=budget)
    asked = {driver.add(prompt(70 + n, n), 12)[0]: prompt(70 + n, n) for n in range(3)}
    driver.run()
    for request, tokens in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, 12)


@pytest.mark.every_family(shared=(2 * BLOCK + 5,))
@pytest.mark.parametrize("shared", [BLOCK, 2 * BLOCK, 2 * BLOCK + 5])
def test_prefix_hits(candidate, shared):
    driver = driver_of(candidate, enable_prefix_caching=True)
    stem = prompt(shared)
    for n in range(3):
        tokens = stem + prompt(9, 10 + n)
        [request] = driver.add(tokens, 12)
        driver.run()
        check_greedy(driver, request, candidate.expect, tokens, 12)
    assert driver.stats.prefix_hits == 2 * candidate.hit(shared)


def test_a_hit_on_the_whole_prompt(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True)
    for _ in range(3):
        [request] = driver.add(prompt(2 * BLOCK), 12)
        driver.run()
        check_greedy(driver, request, candidate.expect, prompt(2 * BLOCK), 12)
    assert driver.stats.prefix_hits == 2 * (
        candidate.hit(2 * BLOCK - 1) if candidate.ends_hits_at_borders else 2 * BLOCK - 1
    )


def test_an_answer_that_becomes_a_prompt_is_found_in_the_cache(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True)
    [first] = driver.add(prompt(20), 50)
    driver.run()
    longer = prompt(20) + driver.tokens[first]
    [second] = driver.add(longer, 10)
    driver.run()
    check_greedy(driver, second, candidate.expect, longer, 10)
    assert driver.stats.prefix_hits == 2 * BLOCK


@pytest.mark.every_family(caching=(True,))
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_and_resumption(candidate, caching):
    driver = driver_of(candidate, enable_prefix_caching=caching)
    asked = {driver.add(prompt(40 + n, n), 64)[0]: prompt(40 + n, n) for n in range(8)}
    driver.run()
    assert driver.stats.preemptions > 0
    for request, tokens in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, 64)


@pytest.mark.every_family(length=(BLOCK, 2 * BLOCK + 7))
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_forked_samples_share_the_prompt_and_part_ways_in_peace(candidate, length):
    driver = driver_of(candidate)
    ids = driver.add(prompt(length), 40, n=4)
    driver.run()
    for request in ids:
        check_greedy(driver, request, candidate.expect, prompt(length), 40)


def test_forks_beside_strangers_under_pressure(candidate):
    driver = driver_of(candidate, enable_prefix_caching=True, max_num_seqs=6, max_num_batched_tokens=48)
    asked = {}
    for n in range(3):
        asked |= dict.fromkeys(driver.add(prompt(50, n), 60, n=3), prompt(50, n))
        asked |= dict.fromkeys(driver.add(prompt(50, n) + prompt(20, 9), 60), prompt(50, n) + prompt(20, 9))
    driver.run()
    for request, tokens in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, 60)


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
        assert got == candidate.expect(tokens, 30, guess=got)[: len(got)]
        if driver.ends[request].finish_reason is not FinishReason.ABORT:
            assert len(got) == 30


@pytest.mark.every_family
def test_logprobs_do_not_change_tokens(candidate):
    candidate.needs("logprobs")
    driver = driver_of(candidate)
    [request] = driver.add(prompt(30), 10, logprobs=3, prompt_logprobs=1)
    outputs = []
    while driver.has_work or not outputs:
        outputs += driver.step()
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    expected = candidate.expect(prompt(30), 10, guess=driver.tokens[request])
    assert driver.tokens[request] == expected == [entry.token_id for entry in entries]
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id and len(entry.top) == 3 for entry in entries)
    [info] = [output.prompt for output in outputs if output.prompt is not None]
    assert [entry.token_id for entry in info.logprobs] == candidate.read(prompt(30))[1:]


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


def test_samples_differ_by_their_seeds_and_from_greedy(candidate):
    driver = driver_of(candidate)
    seeds = (1, 2, 1, 3)
    ids = [driver.add(prompt(40), 30, temperature=1.5, seed=seed)[0] for seed in seeds]
    driver.run()
    samples = [tuple(driver.tokens[i]) for i in ids]
    assert len({*samples, tuple(candidate.expect(prompt(40), 30))}) == 4
    assert samples[0] == samples[2]


def test_stop_tokens_and_minimum_lengths(candidate):
    tokens = candidate.expect(prompt(25), 20)
    stop = tokens[5]
    driver = driver_of(candidate)
    [request] = driver.add(prompt(25), 20, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens[request] == tokens[: tokens.index(stop) + 1]
    assert driver.ends[request].finish_reason is FinishReason.STOP
    assert driver.ends[request].stop_token_id == stop


# -- what another engine has begun -----------------------------------------------------------------------------


@pytest.mark.every_family
@pytest.mark.parametrize("done", [1, BLOCK + 5])
def test_going_on_behind_what_another_engine_has_put_out(candidate, done):
    candidate.needs("our scheduler")
    whole = driver_of(candidate)
    [request] = whole.add(prompt(20), 50)
    whole.run()
    expected = candidate.expect(prompt(20), 50, guess=whole.tokens[request])
    driver = driver_of(candidate, enable_prefix_caching=True)
    [request] = driver.add(prompt(20), 50, behind=expected[:done])
    driver.run()
    assert driver.tokens[request] == expected[done:]
    assert driver.ends[request].finish_reason is FinishReason.LENGTH
    assert request not in driver.cached, "its client knows of the prompt already"


SAMPLINGS: dict[str, dict[str, Any]] = {
    "random": {"temperature": 1.2, "seed": 5, "top_p": 0.95},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bad words": {"bad_words": ((9,), (11, 12), (40,))},
    "least tokens": {"min_tokens": 35, "ignore_eos": False, "logit_bias": {2: 20.0}},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_going_on_keeps_what_depends_on_the_output_so_far(candidate, sampling):
    candidate.needs("our scheduler", "logprobs")
    whole = driver_of(candidate)
    [request] = whole.add(prompt(20), 50, **sampling)
    whole.run()
    expected = whole.tokens[request]
    assert len(expected) > 25
    driver = driver_of(candidate)
    [request] = driver.add(prompt(20), 50, behind=expected[:25], **sampling)
    driver.run()
    assert driver.tokens[request] == expected[25:]


# -- steps in flight -------------------------------------------------------------------------------------------


def _mixed_workload(driver, stop):
    """Prompts in parts, samples, stop tokens, aborts, and more than the KV cache holds."""
    for n in range(4):
        driver.add(prompt(60 + n, n), 70)
        driver.add(prompt(20, n), 40, n=2, temperature=1.0, seed=n)
        driver.add(prompt(35), 40, stop_token_ids=(stop,))
    given_up = driver.add(prompt(50, 9), 100)[0]
    driver.run(until=lambda: len(driver.tokens[given_up]) > 3)
    driver.abort(given_up)
    driver.run()
    del driver.tokens[given_up]
    return driver.tokens, {i: end.finish_reason for i, end in driver.ends.items()}


def test_steps_in_flight_change_nothing(candidate):
    candidate.needs("steps in flight")
    stop = candidate.expect(prompt(35), 20)[12]
    found = []
    for depth in (1, 2, 3):
        driver = driver_of(
            candidate, enable_prefix_caching=True, max_num_seqs=7, max_num_batched_tokens=60, steps_in_flight=depth
        )
        found.append(_mixed_workload(driver, stop))
    assert found[1] == found[0]
    assert found[2] == found[0]
    for request, tokens in list(found[0][0].items())[0:12:4]:
        assert tokens == candidate.expect(prompt(60 + request // 4, request // 4), 70, guess=tokens)


# -- guesses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_guesses_change_nothing(candidate, monkeypatch, depth, sampling):
    """Guesses that are right, wrong in the middle and wrong from the start, whatever the model says."""
    candidate.needs("drafts")
    limits = {"enable_prefix_caching": True, "max_num_batched_tokens": 80, "steps_in_flight": depth}
    prompts = [prompt(30 + 7 * n, n) for n in range(6)]
    plain = driver_of(candidate, **limits)
    ids = [plain.add(tokens, 60, **sampling)[0] for tokens in prompts]
    plain.run()
    known = {tuple(tokens): plain.tokens[i] for i, tokens in zip(ids, prompts, strict=True)}

    class Guesses(PromptLookup):
        def __init__(self, token_ids, max_length):
            super().__init__(token_ids, max_length)
            self.tokens = list(token_ids)

        def append(self, token_ids):
            super().append(token_ids)
            self.tokens += token_ids

        def guess(self, limit):
            start = next(start for start in known if tuple(self.tokens[: len(start)]) == start)
            done = len(self.tokens) - len(start)
            right = known[start][done : done + min(limit, 4)]
            wrong = done % 3  # so many right ones, then one that is not
            return [max(token - 1, 1 - token) if index == wrong else token for index, token in enumerate(right)]

    monkeypatch.setattr("penstock.engines.scheduler.speculation.PromptLookup", Guesses)
    driver = driver_of(candidate, speculative="ngram", **limits)
    again = [driver.add(tokens, 60, **sampling)[0] for tokens in prompts]
    driver.run()
    assert [driver.tokens[i] for i in again] == [plain.tokens[i] for i in ids]
    assert 0 < driver.stats.accepted_tokens < driver.stats.draft_tokens
    assert driver.stats.steps < depth * plain.stats.steps  # whose guesses are verified sits out the next step


def test_guesses_from_the_text_itself_change_nothing(candidate):
    candidate.needs("drafts")
    driver = driver_of(candidate, speculative="ngram", enable_prefix_caching=True, max_num_batched_tokens=60)
    tokens = prompt(12) * 4
    asked = [driver.add(tokens + prompt(n, n), 80)[0] for n in range(8)]
    driver.run()
    for n, request in enumerate(asked):
        check_greedy(driver, request, candidate.expect, tokens + prompt(n, n), 80)


# -- vectors ---------------------------------------------------------------------------------------------------


@pytest.mark.every_family
@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK + 5])
def test_a_vector_is_the_last_hidden_state(candidate, length):
    candidate.needs("vectors")
    driver = driver_of(candidate, enable_prefix_caching=True, max_num_batched_tokens=40)
    for _ in range(2):  # the second time from the prefix cache
        request = driver.pool(prompt(length))
        driver.run()
        assert driver.ends[request].finish_reason is FinishReason.STOP
        assert driver.ends[request].pooled == pytest.approx(candidate.vector(prompt(length)), abs=candidate.tolerance)
    assert driver.tokens[request] == []


def test_a_vector_is_scaled_to_length_1_where_that_is_asked_for(candidate):
    candidate.needs("vectors")
    driver = driver_of(candidate)
    request = driver.pool(prompt(20), normalize=True)
    driver.run()
    expected = candidate.vector(prompt(20))
    scaled = [number / math.hypot(*expected) for number in expected]
    assert driver.ends[request].pooled == pytest.approx(scaled, abs=candidate.tolerance or 1e-12)


async def test_vectors_beside_running_chats(candidate):
    """Through the client, as the gateway does: chats run before, while and after the vectors are computed."""
    candidate.needs("vectors")
    candidate.engine.reset()
    engine = InlineEngine(candidate.engine, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48))

    def request(tokens, params):
        return AddRequest(engine.new_ids(1), tokens, params, arrival_time=0.0)

    chat = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    chats = [request(prompt(40 + n, n), chat) for n in range(4)]
    vectors = [request(prompt(30 + 20 * n, n), PoolingParams(normalize=False)) for n in range(4)]
    await engine.start()
    try:
        chatting = engine.submit(chats)
        [first] = await anext(chatting)
        said = {i: [] for i in (chat.ids[0] for chat in chats)}
        said[first.id] += first.token_ids
        pooled = {}
        async for outputs in engine.submit(vectors):
            pooled |= {output.id: output.pooled for output in outputs}
        assert chatting.live_ids
        async for outputs in chatting:
            for output in outputs:
                said[output.id] += output.token_ids
    finally:  # the runner is not this engine's to close
        engine._task.cancel()
    for n, asked in enumerate(vectors):
        assert pooled[asked.ids[0]] == pytest.approx(candidate.vector(prompt(30 + 20 * n, n)), abs=candidate.tolerance)
    for n, asked in enumerate(chats):
        assert said[asked.ids[0]] == candidate.expect(prompt(40 + n, n), 40, guess=said[asked.ids[0]])


# -- failing steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_ends_only_the_guilty(candidate, depth):
    candidate.needs("our scheduler")
    marker = 299
    runner = Failing(candidate.engine, marker)
    driver = Driver(
        runner, max_num_seqs=8, max_num_batched_tokens=96, enable_prefix_caching=True, steps_in_flight=depth
    )
    [cached] = driver.add(prompt(3 * BLOCK), 20)
    driver.run()
    asked = {driver.add(prompt(40 + n, n), 40)[0]: prompt(40 + n, n) for n in range(3)}
    driver.run(until=lambda: all(len(driver.tokens[i]) > 5 for i in asked))
    [guilty] = driver.add([marker, *prompt(30)], 20)
    asked |= {
        driver.add(prompt(3 * BLOCK) + prompt(n, n), 40)[0]: prompt(3 * BLOCK) + prompt(n, n) for n in range(1, 4)
    }
    driver.run()
    assert runner.num_failures > 1
    assert driver.ends[guilty].error.code == "step_failed"
    for request, tokens in asked.items():
        assert driver.ends[request].error is None
        check_greedy(driver, request, candidate.expect, tokens, 40)
    check_greedy(driver, cached, candidate.expect, prompt(3 * BLOCK), 20)
    assert driver.stats.prefix_hits > 0


# -- windows ---------------------------------------------------------------------------------------------------


@pytest.mark.every_family
def test_blocks_behind_a_window_are_given_back(candidate):
    candidate.needs("windows")
    groups = candidate.engine.info.kv_groups
    driver = driver_of(candidate, max_num_batched_tokens=32)
    [request] = driver.add(prompt(100), 90)
    most = 0
    while len(driver.tokens[request]) < 90:
        driver.step()
        if driver.tokens[request]:
            most = max(most, driver.stats.num_blocks - driver.stats.num_free_blocks)
    check_greedy(driver, request, candidate.expect, prompt(100), 90)
    needed = (min(190, group.window + 32) if group.window else 190 for group in groups)
    assert most <= sum(-(-tokens // group.block_size) + 1 for tokens, group in zip(needed, groups, strict=True))
    assert most < sum(-(-190 // group.block_size) for group in groups)


@pytest.mark.every_family
def test_blocks_that_a_window_leaves_are_free_for_others_at_once(candidate):
    """Prompts come in as fast as blocks are given back, and overwrite them."""
    candidate.needs("windows")
    driver = driver_of(candidate, max_num_batched_tokens=64)
    rng = random.Random(3)
    asked = {}
    for n in range(10):
        tokens, count = prompt(rng.randrange(5, 60), n), rng.randrange(20, 70)
        asked[driver.add(tokens, count)[0]] = (tokens, count)
        for _ in range(rng.randrange(1, 9)):
            driver.step()
    driver.run()
    for request, (tokens, count) in asked.items():
        check_greedy(driver, request, candidate.expect, tokens, count)


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
    candidate.needs("LoRA adapters")
    expected = {"": candidate.expect}
    for name in ("first", "second"):
        key = f"{name}:{next(_loads)}"
        folder, expected[key] = candidate.adapter(key)
        load_adapter(candidate.engine, key, folder)
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
        check_greedy(driver, request, adapters[key], prompt(20 + 17 * n, n), 14)
    assert len({tuple(expect(prompt(20), 14)) for expect in adapters.values()}) == 3


def test_adapters_share_no_blocks(candidate, adapters):
    driver = driver_of(candidate, enable_prefix_caching=True)
    hits = []
    for key in [*adapters, *adapters]:
        [request] = driver.add(prompt(2 * BLOCK + 5), 8, adapter=key)
        driver.run()
        check_greedy(driver, request, adapters[key], prompt(2 * BLOCK + 5), 8)
        hits.append(driver.stats.prefix_hits // BLOCK)
    assert hits == [0, 0, 0, 2, 4, 6]


def test_preemption_among_adapters(candidate, adapters):
    driver = driver_of(candidate, enable_prefix_caching=True)
    asked = {}
    for n, key in enumerate([*adapters] * 3):
        asked[driver.add(prompt(40 + n, n), 64, adapter=key)[0]] = (key, n)
    driver.run()
    assert driver.stats.preemptions > 0
    for request, (key, n) in asked.items():
        check_greedy(driver, request, adapters[key], prompt(40 + n, n), 64)


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
    load_adapter(candidate.engine, new, folder)
    [after] = driver.add(prompt(3 * BLOCK), 4, adapter=new)
    driver.run(until=lambda: after in driver.ends)
    if not driver.runs_by_itself:  # one that runs by itself does not wait for anybody
        assert running not in driver.ends
    driver.run()
    candidate.engine.unload_adapter(new)
    check_greedy(driver, before, adapters[old], prompt(3 * BLOCK), 4)
    check_greedy(driver, after, expect, prompt(3 * BLOCK), 4)
    check_greedy(driver, running, adapters[stays], prompt(30, 1), 60)
    assert driver.stats.prefix_hits == 0


def test_predictions_change_nothing_but_the_number_of_steps(candidate):
    candidate.needs("drafts")
    asked, length = prompt(20), 40
    right = candidate.expect(asked, length)
    wrong = [*right[:12], 7, 7, 7, *right[20:]]
    for prediction, fewer in ((right, True), (wrong, True), ([5, 6] * 20, False)):
        driver = driver_of(candidate)
        [request] = driver.add(asked, length, prediction=tuple(prediction))
        [other] = driver.add(prompt(9), length)
        driver.run()
        assert driver.tokens[request] == right
        check_greedy(driver, other, candidate.expect, prompt(9), length)
        num_right, _ = driver.ends[request].guessed
        assert driver.stats.accepted_tokens == num_right
        assert (num_right > 5) is fewer


def test_tokens_that_the_request_does_not_allow(candidate):
    candidate.needs("logprobs")
    asked, free = prompt(20), candidate.expect(prompt(20), 12)
    at = next(at for at in range(1, 11) if free[at : at + 2] not in [free[n : n + 2] for n in range(at)])
    driver = driver_of(candidate)
    [without] = driver.add(asked, 12, bad_words=((free[0],),))
    [pair] = driver.add(asked, 12, bad_words=(tuple(free[at : at + 2]),))
    [few] = driver.add(asked, 12, allowed_token_ids=(5, 9, 40), temperature=1.0, seed=1)
    [other] = driver.add(asked, 12)
    driver.run()
    assert free[0] not in driver.tokens[without]
    assert driver.tokens[pair][: at + 1] == free[: at + 1]
    assert driver.tokens[pair][at + 1] != free[at + 1]
    assert set(driver.tokens[few]) <= {5, 9, 40}
    assert driver.tokens[other] == free


class Favourite:
    """A logits processor: one token, three times."""

    def __init__(self, parameters: Mapping[str, Any], vocab_size: int) -> None:
        self.token = parameters["token"]

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Any) -> None:
        if len(output) < 3:
            logits[self.token] = 1e4
        elif self.token == 13:
            raise RuntimeError("unlucky")


def test_logits_processors(candidate, monkeypatch):
    if not candidate.engine.info.supports_processors:
        pytest.skip("not of this engine: logits processors")
    entry = EntryPoint("favourite", f"{__name__}:Favourite", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda group: [entry])
    driver = driver_of(candidate)

    def add(parameters: dict[str, Any], name: str = "favourite") -> int:
        return driver.add(prompt(20), 6, processors=(ProcessorCall(name, parameters),))[0]

    right, unlucky, without, unknown = add({"token": 9}), add({"token": 13}), add({}), add({}, "nobody")
    [other] = driver.add(prompt(20), 6)
    driver.run()
    assert driver.tokens[right] == [9, 9, 9, *candidate.expect([*prompt(20), 9, 9, 9], 3)]
    assert driver.tokens[unlucky] == [13, 13, 13]
    for request, told in ((unlucky, "failed"), (without, "does not take"), (unknown, "not installed")):
        error = driver.ends[request].error
        assert (error.code, error.param) == ("invalid_request", "logits_processors")
        assert told in error.message
    check_greedy(driver, other, candidate.expect, prompt(20), 6)
