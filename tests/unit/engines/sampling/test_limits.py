"""Allowed tokens, bad words, and logits processors of other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.messages import ProcessorCall, SamplingParams
from penstock.engines.errors import InvalidRequestError
from penstock.engines.kit.sampling import Sampler, SamplingState, processors
from penstock.engines.kit.sampling.limits import TokenLimits
from penstock.engines.kit.sampling.masks import TokenMask
from penstock.engines.kit.sampling.processors import ProcessorChain

VOCAB = 40
EOS = 0


def limits(output: Sequence[int] = (), **settings: Any) -> TokenLimits:
    return TokenLimits(SamplingParams(max_tokens=9, **settings), output)


def state_of(output: Sequence[int] = (), chain: ProcessorChain | None = None, **settings: Any) -> SamplingState:
    state = SamplingState.create(SamplingParams(max_tokens=9, **settings), 7, (EOS,), [], output, None, chain)
    assert state is not None
    return state


def left(found: TokenMask) -> set[int]:
    return set(found.ids.tolist()) if found.allowed else set(range(VOCAB)) - set(found.ids.tolist())


@pytest.mark.parametrize("allowed", [None, (3, 5, 7, 9)])
@pytest.mark.parametrize("mask", [None, TokenMask(np.array([3, 5, 8]), True), TokenMask(np.array([5, 8]), False)])
@pytest.mark.parametrize("words", [(), ((5,),), ((5,), (1, 2, 3)), ((2, 3), (9, 9), (2, 8))])
def test_what_is_left_of_a_mask(allowed: Any, mask: TokenMask | None, words: Any) -> None:
    for output in ([], [1, 2], [4, 1, 2], [2, 1], [9]):
        expected = set(range(VOCAB)) if allowed is None else set(allowed)
        expected &= set(range(VOCAB)) if mask is None else left(mask)
        expected -= {word[-1] for word in words if tuple([*output][len(output) + 1 - len(word) :]) == word[:-1]}
        late = limits(allowed_token_ids=allowed, bad_words=words)
        for token in output:
            late.append(token)
        for one in (limits(output, allowed_token_ids=allowed, bad_words=words), late):
            assert left(one.narrowed(mask)) == expected


def test_a_long_list_of_allowed_tokens_is_not_made_again_in_each_step() -> None:
    one = limits(allowed_token_ids=(9, 3, 5, 3))
    assert one.narrowed(None).ids.tolist() == [3, 5, 9]
    assert one.narrowed(None).ids is one.narrowed(None).ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_chosen_among_the_others(temperature: float) -> None:
    sampler, rng = Sampler(VOCAB), np.random.default_rng(1)
    for _ in range(30):
        logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
        before = logits.copy()
        states = [
            state_of(allowed_token_ids=(3, 30), temperature=temperature),
            state_of([1, 2], bad_words=((1, 2, int(logits[1].argmax())), (4,)), temperature=temperature),
            state_of(bad_words=((int(logits[2].argmax()),),), temperature=temperature),
        ]
        first, second, third = sampler.sample(logits, states).tolist()
        assert first in (3, 30)
        assert second not in (int(before[1].argmax()), 4)
        assert third != int(before[2].argmax())
        assert (logits == before).all()


def test_where_nothing_is_left_the_row_says_so() -> None:
    state = state_of(allowed_token_ids=(3,), bad_words=((3,),), temperature=0)
    assert Sampler(VOCAB).sample(np.zeros((2, VOCAB), np.float32), [state, None]).tolist() == [-1, 0]


def test_bad_words_behind_guesses_are_seen() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 9] = 2
    logits[:, 8] = 1
    state = state_of(bad_words=((9, 9),), temperature=0)
    [extension] = Sampler(VOCAB).extend(logits, [state], [[9, 9]])
    assert extension.token_ids == [9, 8]


class Favourite:
    """Adds to one token's logit, which its parameters name, unless the output has it already."""

    def __init__(self, parameters: Mapping[str, Any], vocab_size: int) -> None:
        if parameters["token"] >= vocab_size:
            raise ValueError("there is no such token")
        self.weight = parameters.get("weights", [100])[0]
        self.token = parameters["token"]

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Any) -> None:
        if self.token == 13:
            raise RuntimeError("unlucky")
        if self.token not in output:
            logits[self.token] += self.weight


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("favourite", f"{__name__}:Favourite", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda group: [entry] if group == processors.GROUP else [])


def chain_of(*tokens: int, output: Sequence[int] = ()) -> ProcessorChain:
    return ProcessorChain([ProcessorCall("favourite", {"token": token}) for token in tokens], [1], output, VOCAB)


def test_a_processor_changes_logits_until_it_does_not() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    state = state_of(chain=chain_of(5), temperature=0)
    tokens = []
    for _ in range(2):
        tokens += Sampler(VOCAB).sample(logits, [state]).tolist()
        state.append(tokens[-1])
    assert tokens == [5, VOCAB - 1]
    assert (logits[0] == np.arange(VOCAB)).all()
    resumed = state_of([5], chain_of(5, output=[5]), temperature=0)
    assert Sampler(VOCAB).sample(logits, [resumed]).tolist() == [VOCAB - 1]


def test_one_that_fails_ends_its_request_alone() -> None:
    broken = state_of(chain=chain_of(13), allowed_token_ids=(3, 4), temperature=0)
    assert Sampler(VOCAB).sample(np.zeros((2, VOCAB), np.float32), [broken, None]).tolist() == [-1, 0]
    assert isinstance(broken.failure, InvalidRequestError)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ProcessorCall("nobody", {}), "not installed"),
        (ProcessorCall("favourite", {"token": VOCAB}), "no such token"),
        (ProcessorCall("favourite", {}), "does not take these parameters"),
        (ProcessorCall("favourite", {"token": 5, "weights": []}), "cannot be made"),
    ],
)
def test_processors_that_cannot_be_made(call: ProcessorCall, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        ProcessorChain([call], [], [], VOCAB)
