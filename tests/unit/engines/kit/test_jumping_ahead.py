"""Forced tokens that are computed several at a time change nothing of what each request gets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.contract.messages import FinishReason, Grammar, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.kit.grammars import Grammars
from penstock.engines.kit.sampling import Sampler, SamplingState, token_logprobs_rows
from penstock.engines.kit.sampling.grammar import GrammarState, MasksAhead
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.scheduler.speculation import Speculation
from penstock.kvcache import KVGroup
from support.engine import Driver
from unit.engines.kit.fake_model import POISON, VOCAB_SIZE, FakeModel, logits_after

GROUPS = {"whole": (KVGroup(4),), "mixed": (KVGroup(4, window=5), KVGroup(4), KVGroup(4, window=5))}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logprobs": 1},
    {"logit_bias": {3: 2.0}},
    {"stop_token_ids": (4,)},
    {"stop_token_ids": (2,), "min_tokens": 5},
]


class Cycle:
    """Allows one set of tokens after the other, over and over."""

    def __init__(self, sets: Sequence[Sequence[int]], tells: bool) -> None:
        self.sets = sets
        self.tells = tells
        """Says what is forced."""
        self.at = 0
        self.problem = ""
        self.can_be_free = self.is_free = self.is_complete = False

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.sets[self.at % len(self.sets)]:
                self.problem = f"{token_id} is not allowed"
            self.at += 1

    def forced(self) -> list[int]:
        found = []
        for at in range(self.at, self.at + 5):
            allowed = self.sets[at % len(self.sets)]
            if len(allowed) > 1 or not self.tells:
                break
            found.append(allowed[0])
        return found


class Filler:
    def fill(self, cycles: Sequence[Cycle], masks: Any) -> None:
        for cycle, mask in zip(cycles, masks, strict=True):
            mask[:] = sum(1 << token for token in cycle.sets[cycle.at % len(cycle.sets)])


class Compiled:
    is_worn_out = False

    def __init__(self, text: str) -> None:
        self.sets = json.loads(text)

    def start(self, output: Sequence[int]) -> Any:
        cycle = Cycle(self.sets, tells=True)
        cycle.consume(output)
        return cycle


@pytest.fixture(scope="module", autouse=True)
def _cycles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        filler: Any = Filler()
        masks = MasksAhead(filler, VOCAB_SIZE)
        patch.setattr(Grammars, "compile", lambda self, grammar: Compiled(grammar.text))
        patch.setattr(Grammars, "start", lambda self, compiled, output: GrammarState(compiled.start(output), masks))
        patch.setattr(Grammars, "begin_masks", lambda self, states: masks.begin(states))
        patch.setattr(Speculation, "_jump_pays", lambda *_: True)
        yield


class BoundModel(FakeModel):
    @property
    def info(self) -> ModelInfo:
        return msgspec.structs.replace(super().info, supports_grammars=True)


def driver_of(groups: str = "whole", num_blocks: int = 40, depth: int = 2, lazy: bool = False, **config: Any) -> Driver:
    model = BoundModel(GROUPS[groups], num_blocks, depth, lazy=lazy)
    runner = StepRunner(model, model.info, max_num_seqs=8, model_dir=Path("unused"))
    return Driver(runner, max_num_seqs=8, steps_in_flight=depth, **config)


def alone(prompt: list[int], count: int, seed: int, windows: list[int], sets: Any, params: Any) -> Any:
    """Tokens and logprobs of one request, one mask after the other."""
    p = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **params})
    filler: Any = Filler()
    cycle: Any = Cycle(sets, tells=False)
    grammar = GrammarState(cycle, MasksAhead(filler, VOCAB_SIZE)) if sets else None
    state, tokens, entries = SamplingState.create(p, seed, (), prompt, [], grammar), list(prompt), []
    for number in range(count):
        logits = logits_after(tokens, windows)
        token = int(Sampler(VOCAB_SIZE).sample(logits[None], [state])[0])
        if token < 0:
            return None
        if state is not None:
            state.append(token)
        if p.logprobs is not None:
            entries.append(token_logprobs_rows(logits[None], np.array([token]), p.logprobs)[0])
        tokens.append(token)
        if token in p.stop_token_ids and number >= p.min_tokens:
            break
    return tokens[len(prompt) :], entries


SETS = st.lists(st.lists(st.integers(0, POISON - 1), min_size=1, max_size=3, unique=True), max_size=9)
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, POISON - 1), min_size=1, max_size=20),
        st.integers(1, 18),
        st.integers(1, 3),
        st.sampled_from(PARAMS),
        SETS,
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=6,
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
    jump_ahead=st.booleans(),
)
def test_everyone_gets_what_it_gets_one_by_one(
    requests: Any, groups: str, num_blocks: int, tokens: int, depth: int, lazy: bool, speculative: Any, jump_ahead: bool
) -> None:
    driver = driver_of(
        groups, num_blocks, depth, lazy, max_num_batched_tokens=tokens, speculative=speculative, jump_ahead=jump_ahead
    )
    logprobs: dict[int, list[Any]] = {}

    def step() -> None:
        for output in driver.step():
            logprobs.setdefault(output.id, []).extend(output.logprobs or [])

    wanted = []
    for number, (prompt, count, n, params, sets, pause) in enumerate(requests):
        grammar = Grammar("regex", json.dumps(sets)) if sets else None
        ids = driver.add(prompt, count, n, seed=100 * number, grammar=grammar, **params)
        wanted += [(i, prompt, count, 100 * number + nth, sets, params) for nth, i in enumerate(ids)]
        for _ in range(pause):
            step()
    while len(driver.ends) < len(wanted):
        step()
    windows = [group.window for group in GROUPS[groups]]
    for request_id, prompt, count, seed, sets, params in wanted:
        expected = alone(prompt, count, seed, windows, sets, params)
        if expected is None:
            assert driver.ends[request_id].error is not None
            continue
        assert driver.ends[request_id].error is None
        assert (driver.tokens[request_id], logprobs[request_id]) == expected
    assert jump_ahead or driver.stats.forced_tokens == 0


RUN = Grammar("regex", json.dumps([[1], [3], [5], [0], [2], [1, 4]]))


def steps_of(driver: Driver, count: int, **params: Any) -> tuple[int, list[int]]:
    [request_id] = driver.add([0, 1, 2], count, grammar=RUN, **params)
    driver.run()
    return driver.stats.steps, driver.tokens[request_id]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}, {"frequency_penalty": 1.0}])
def test_a_run_of_forced_tokens_is_one_step(depth: int, params: dict[str, Any]) -> None:
    slow, one_by_one = steps_of(driver_of(depth=depth, jump_ahead=False), 31, **params)
    driver = driver_of(depth=depth)
    fast, tokens = steps_of(driver, 31, **params)
    assert tokens == one_by_one
    assert fast <= slow * 2 / 3
    assert fast + driver.stats.forced_tokens == slow


@pytest.mark.parametrize("count", range(1, 13))
def test_max_tokens_among_forced_tokens(count: int) -> None:
    driver = driver_of()
    _, tokens = steps_of(driver, count)
    assert len(tokens) == count
    [end] = driver.ends.values()
    assert end.finish_reason is FinishReason.LENGTH
    assert driver.stats.forced_tokens > 0 or count < 4


@pytest.mark.parametrize(
    "params", [{"logprobs": 0}, {"bad_words": ((6, 6),)}, {"allowed_token_ids": tuple(range(6))}, {"min_tokens": 3}]
)
def test_tokens_that_something_else_decides_about_go_one_by_one(params: dict[str, Any]) -> None:
    driver = driver_of()
    steps_of(driver, 12, **params)
    assert driver.stats.forced_tokens == 0
