"""Sampling where grammars allow some of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import InvalidRequestError
from penstock.engines.kit.sampling import Sampler, SamplingState
from penstock.engines.kit.sampling.grammar import GrammarState, MasksAhead
from penstock.engines.kit.sampling.masks import bit_masks, shorter_lists

VOCAB = 300
EOS = 2
FEW = list(range(10, 30))
MOST = list(range(10, VOCAB - 10))
ALL = list(range(VOCAB))


class Script:
    """Allows one set of tokens after the other, whatever was sampled; then the output is complete."""

    def __init__(self, *steps: Sequence[int]) -> None:
        self.steps = list(steps)
        self.consumed: list[int] = []
        self.problem = ""
        self.can_be_free = any(len(step) == VOCAB for step in steps)

    def consume(self, token_ids: Sequence[int]) -> None:
        self.consumed += token_ids

    def forced(self) -> list[int]:
        return []

    @property
    def is_complete(self) -> bool:
        return len(self.consumed) >= len(self.steps)

    @property
    def is_free(self) -> bool:
        return not self.is_complete and len(self.allowed) == VOCAB

    @property
    def allowed(self) -> Sequence[int]:
        return [EOS] if self.is_complete else self.steps[len(self.consumed)]


class Filler:
    def __init__(self) -> None:
        self.num_masks = 0

    def fill(self, scripts: Sequence[Script], masks: Any) -> None:
        self.num_masks += len(scripts)
        bits = np.zeros((len(scripts), (VOCAB + 31) // 32 * 32), np.bool_)
        for row, script in zip(bits, scripts, strict=True):
            row[list(script.allowed)] = True
        masks[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def follow(*steps: Sequence[int], filler: Any = None) -> GrammarState:
    script: Any = Script(*steps)
    return GrammarState(script, MasksAhead(filler or Filler(), VOCAB))


def sampling(grammar: GrammarState | None, seed: int = 0, **settings: Any) -> SamplingState:
    params = SamplingParams(max_tokens=100, **settings)
    state = SamplingState.create(params, seed, (EOS,), [], [], grammar)
    assert state is not None
    return state


def random_logits(rows: int) -> Any:
    return (np.random.default_rng(5).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def without(logits: Any, allowed: Sequence[int]) -> Any:
    masked = np.full_like(logits, -np.inf)
    masked[..., list(allowed)] = logits[..., list(allowed)]
    return masked


@pytest.mark.parametrize("allowed", [FEW, MOST, [7], ALL], ids=["few", "most", "one", "all"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {0: 90.0, 15: 50.0}}])
@pytest.mark.parametrize("writeable", [True, False])
def test_the_likeliest_of_the_allowed(allowed: list[int], settings: dict[str, Any], writeable: bool) -> None:
    logits = random_logits(6)
    before = logits.copy()
    logits.flags.writeable = writeable
    states = [sampling(follow(allowed), **settings) if row % 2 else None for row in range(6)]
    chosen = Sampler(VOCAB).sample(logits, states)
    biased = before.copy()
    for token, bias in settings.get("logit_bias", {}).items():
        biased[:, token] += bias
    wanted = np.where(np.arange(6) % 2, without(biased, allowed).argmax(axis=1), before.argmax(axis=1))
    assert chosen.tolist() == wanted.tolist()
    assert (logits == before).all()


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.05, "temperature": 1.7}])
def test_where_few_are_forbidden_draws_are_those_without_them(settings: dict[str, Any]) -> None:
    logits = np.repeat(random_logits(1), 400, axis=0)
    logits[:, 3] = 50  # forbidden, and far above the others
    with_grammar = Sampler(VOCAB).sample(logits, [sampling(follow(MOST), seed, **settings) for seed in range(400)])
    removed = Sampler(VOCAB).sample(without(logits, MOST), [sampling(None, seed, **settings) for seed in range(400)])
    assert with_grammar.tolist() == removed.tolist()
    assert set(with_grammar.tolist()) <= set(MOST)


def test_where_few_are_allowed_draws_follow_their_distribution() -> None:
    logits = np.repeat(random_logits(1) / 3, 4000, axis=0)
    logits[:, 3] = 50
    drawn = Sampler(VOCAB).sample(logits, [sampling(follow(FEW), seed) for seed in range(4000)])
    weights = np.exp(logits[0, FEW])
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[FEW].sum() == 4000
    expected = 4000 * weights / weights.sum()
    # chi-square with 19 degrees of freedom: above 50 in one of 10,000 cases
    assert ((counts[FEW] - expected) ** 2 / expected).sum() < 50


def test_each_token_has_its_own_mask() -> None:
    grammar = follow([5], MOST, FEW)
    state = sampling(grammar, temperature=0.0, min_tokens=50)
    logits = random_logits(1)
    sampler = Sampler(VOCAB)
    output = [sampler.extend(logits, [state], [[]])[0].token_ids[0] for _ in range(4)]
    assert output == [5, without(logits, MOST).argmax(), without(logits, FEW).argmax(), EOS]


def test_guesses_that_the_grammar_forbids_are_wrong() -> None:
    logits = random_logits(4)
    logits[:, 200] = 50
    state = sampling(follow(FEW, MOST, FEW, FEW), temperature=0.0)
    right = [int(without(logits[0], FEW).argmax()), 200]
    [extension] = Sampler(VOCAB).extend(logits, [state], [[*right, 200]])
    assert extension.token_ids == [*right, without(logits[2], FEW).argmax()]
    assert state.grammar is not None
    assert not state.grammar.is_complete
    assert state.grammar.matcher.consumed == extension.token_ids  # type: ignore[attr-defined]


def test_outputs_that_cannot_go_on_end_alone() -> None:
    stuck, broken = follow([]), follow(FEW)
    broken.matcher.problem = "too complex"  # type: ignore[misc]
    broken.note_problem()
    chosen = Sampler(VOCAB).sample(random_logits(3), [sampling(stuck), sampling(broken), sampling(follow([9]))])
    assert chosen.tolist() == [-1, -1, 9]
    assert isinstance(stuck.failure, InvalidRequestError)
    assert isinstance(broken.failure, InvalidRequestError)
    assert "allows no token" in str(stuck.failure)
    assert "too complex" in str(broken.failure)


def test_where_all_is_allowed_there_is_no_mask() -> None:
    filler = Filler()
    state = sampling(follow(ALL, ALL, FEW, ALL, filler=filler), temperature=0.0)
    logits = random_logits(1)
    sampler = Sampler(VOCAB)
    output = []
    for _ in range(4):
        assert state.grammar is not None
        state.grammar._masks.begin([state.grammar])
        output += sampler.extend(logits, [state], [[]])[0].token_ids
    best = logits.argmax()
    assert output == [best, best, without(logits, FEW).argmax(), best]
    assert filler.num_masks == 1


def test_masks_are_computed_once_for_each_token() -> None:
    filler = Filler()
    masks: Any = MasksAhead(filler, VOCAB)  # type: ignore[arg-type]
    scripts: list[Any] = [Script(FEW, MOST), Script(MOST, FEW)]
    grammars = [GrammarState(script, masks) for script in scripts]
    for num_masks in (2, 4):
        masks.begin(grammars)
        masks.begin(grammars)
        found = [grammar.mask() for grammar in grammars]
        assert [mask.allowed for mask in found if mask] == [num_masks == 2, num_masks == 4]
        assert filler.num_masks == num_masks
        for grammar in grammars:
            grammar.append(12)


@pytest.mark.parametrize("vocab", [31, 32, 33, 300, 4096])
def test_bits_become_the_shorter_of_two_lists(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    shares = (0.0, 0.01, 0.49, 0.5, 0.51, 0.99, 1.0)
    bits = rng.random((len(shares), vocab)) < np.array(shares)[:, None]
    masks = bit_masks(len(shares), vocab)
    masks[:] = -1  # also behind the vocabulary
    packed = np.packbits(bits, axis=1, bitorder="little")
    masks.view(np.uint8)[:, : packed.shape[1]] = packed
    if vocab % 8:
        masks.view(np.uint8)[:, packed.shape[1] - 1] |= np.uint8(0xFF << vocab % 8 & 0xFF)
    for row, mask in zip(bits, shorter_lists(masks, vocab), strict=True):
        assert len(mask.ids) <= vocab // 2
        assert mask.ids.tolist() == np.flatnonzero(row == mask.allowed).tolist()


class Forcing(Script):
    """Where one token is allowed, it is forced, and so are those behind it of which the same is true."""

    def forced(self) -> list[int]:
        found = []
        for step in self.steps[len(self.consumed) :]:
            if len(step) != 1:
                break
            found.append(step[0])
        return found


def test_forced_tokens_need_no_masks_of_their_own() -> None:
    filler = Filler()
    script: Any = Forcing([5], [6], [7], FEW, [8], [9])
    grammar = GrammarState(script, MasksAhead(filler, VOCAB))
    state = sampling(grammar)
    logits = random_logits(1)
    written = []
    for _ in range(7):
        assert not grammar.is_complete or len(written) == 6
        [token] = Sampler(VOCAB).sample(logits, [state]).tolist()
        state.append(token)
        written.append(token)
    assert written[:3] == [5, 6, 7]
    assert written[3] in FEW
    assert written[4:] == [8, 9, EOS]
    assert filler.num_masks == 2


def test_what_goes_wrong_behind_forced_tokens_is_told_there() -> None:
    script: Any = Forcing([5], [6], [])
    state = sampling(GrammarState(script, MasksAhead(Filler(), VOCAB)))
    logits, chosen = random_logits(1), []
    for _ in range(3):
        [token] = Sampler(VOCAB).sample(logits, [state]).tolist()
        chosen.append(token)
        if token >= 0:
            assert state.failure is None
            state.append(token)
    assert chosen == [5, 6, -1]
    assert isinstance(state.failure, InvalidRequestError)
