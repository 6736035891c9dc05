from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.kit.sampling import Sampler, SamplingState
from penstock.engines.kit.sampling.sampler import _inverse_cdf
from unit.engines.sampling.oracle import adjusted, distribution

EOS = (2,)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **settings)


def state(
    p: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> SamplingState | None:
    return SamplingState.create(p, seed, EOS, list(prompt), list(output))


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Any:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def draw_many(logits: Any, p: SamplingParams, count: int) -> Any:
    """`count` draws from one row, with seeds 0, 1, ..."""
    batch = np.repeat(logits[None], count, axis=0)
    return Sampler(len(logits)).sample(batch, [state(p, seed) for seed in range(count)]).token_ids


TRUNCATIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 400},
]


@pytest.mark.parametrize("settings", TRUNCATIONS)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    """Chi-square over 6000 seeds; the seeds are fixed, so this passes or fails for ever."""
    logits = random_logits(1, 300, seed=5, scale=1.5)[0]
    p = params(**settings)
    wanted = distribution(logits, p)
    counts = np.bincount(draw_many(logits, p, 6000), minlength=300)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(wanted))
    likely = wanted * 6000 >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(wanted[likely] * 6000, wanted[~likely].sum() * 6000)
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Mean and deviation of chi-square are freedom and sqrt(2 freedom).
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([2, 3, 255, 256, 257, 1000, 5000]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 2000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_only_tokens_of_the_oracle_are_drawn(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    logits = random_logits(1, vocab, seed, scale)[0]
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Float32 may see an edge a hair elsewhere than float64: what lies between a wider and a narrower cut is not judged.
    widened = params(
        temperature=temperature,
        top_k=top_k,
        top_p=min(1.0, top_p + 1e-4) if top_p < 1 else 1.0,
        min_p=max(0.0, min_p - 1e-4 * min_p),
    )
    allowed = set(np.flatnonzero(distribution(logits, widened)))
    assert set(draw_many(logits, p, 40).tolist()) <= allowed


@pytest.mark.parametrize(
    ("settings", "kept"), [({"top_k": 3}, {1, 2, 4}), ({"top_p": 0.49}, {1, 2}), ({"min_p": 1.0}, None)]
)
def test_ties_go_to_the_smaller_id(settings: dict[str, Any], kept: set[int] | None) -> None:
    logits = np.array([0.0, 5.0, 5.0, 0.0, 5.0, 5.0], np.float32)
    assert set(draw_many(logits, params(**settings), 300).tolist()) == (kept or {1, 2, 4, 5})


def test_a_flat_nucleus_is_exactly_as_large_as_it_must_be() -> None:
    logits = np.zeros(5000, np.float32)
    drawn = draw_many(logits, params(top_p=0.01), 2000)
    assert set(drawn.tolist()) == set(range(50))


def test_greedy_rows_of_a_mixed_batch_stay_the_argmax() -> None:
    logits = random_logits(40, 1000)
    states = [state(params(temperature=0.0 if row % 2 else 1.5), row) for row in range(40)]
    drawn = Sampler(1000).sample(logits, states).token_ids
    assert (drawn[1::2] == logits[1::2].argmax(axis=1)).all()
    assert (drawn[::2] != logits[::2].argmax(axis=1)).any()


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_a_seeded_token_does_not_depend_on_its_row_or_its_mates(vocab: int) -> None:
    logits = random_logits(9, vocab)
    p = params(temperature=1.2, top_p=0.97)
    sampler = Sampler(vocab)
    alone = [int(sampler.sample(logits[n : n + 1], [state(p, n)]).token_ids[0]) for n in range(9)]
    together = sampler.sample(logits, [state(p, n) for n in range(9)]).token_ids.tolist()
    backwards = sampler.sample(logits[::-1], [state(p, 8 - n) for n in range(9)]).token_ids.tolist()
    greedy_between = sampler.sample(
        np.repeat(logits, 2, axis=0), [state(p, n // 2) if n % 2 else None for n in range(18)]
    ).token_ids.tolist()
    assert together == alone
    assert backwards[::-1] == alone
    assert greedy_between[1::2] == alone


def test_a_resumed_request_draws_what_it_would_have_drawn() -> None:
    logits = random_logits(6, 500)
    p = params(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.2)
    sampler = Sampler(500)
    whole = state(p, 7, prompt=(1, 2))
    tokens = [int(sampler.sample(logits[n : n + 1], [whole]).token_ids[0]) for n in range(6)]
    resumed = state(p, 7, prompt=(1, 2), output=tuple(tokens[:3]))
    assert [int(sampler.sample(logits[n : n + 1], [resumed]).token_ids[0]) for n in range(3, 6)] == tokens[3:]


@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 19), max_size=8),
    output=st.lists(st.integers(0, 19), max_size=150),
    repetition=st.floats(0.5, 2.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
    bias=st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 200),
    stop=st.lists(st.integers(0, 19), max_size=3),
    ignore_eos=st.booleans(),
)
def test_adjusted_logits_are_those_of_the_formulas(
    seed: int,
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    min_tokens: int,
    stop: list[int],
    ignore_eos: bool,
) -> None:
    p = params(
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop),
        ignore_eos=ignore_eos,
    )
    logits = random_logits(1, 20, seed)[0]
    wanted = adjusted(logits, p, prompt, output, EOS)
    # Half of the output is known at the start, the other half is appended token by token.
    half = len(output) // 2
    known = state(p, 0, tuple(prompt), tuple(output[:half]))
    if known is None:
        assert (wanted == logits).all()
        return
    for token in output[half:]:
        known.append(token)
    row = logits.copy()
    known.adjust(row)
    np.testing.assert_allclose(row, wanted, rtol=1e-4, atol=1e-4)


def test_min_tokens_keeps_stop_tokens_out_until_then() -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, 2], logits[0, 5], logits[0, 7] = 9, 8, 7
    greedy = state(params(temperature=0.0, min_tokens=2, stop_token_ids=(5,)))
    sampler = Sampler(10)
    assert [int(sampler.sample(logits, [greedy]).token_ids[0]) for _ in range(4)] == [7, 7, 2, 2]
    with_eos = state(params(temperature=0.0, min_tokens=2, stop_token_ids=(5,), ignore_eos=True))
    assert int(sampler.sample(logits, [with_eos]).token_ids[0]) == 2


def test_logits_are_only_read() -> None:
    logits = random_logits(4, 300)
    logits.flags.writeable = False
    before = logits.copy()
    p = params(logit_bias={1: 5.0}, repetition_penalty=1.5, top_p=0.5, logprobs=3)
    Sampler(300).sample(logits, [state(p, n, prompt=(1, 2)) for n in range(4)])
    assert (logits == before).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 123, 299])
def test_rows_that_are_not_finite_are_told_apart(poison: float, place: int) -> None:
    logits = random_logits(4, 300)
    logits[2, place] = poison
    states = [None, state(params(), 1), state(params(logprobs=1), 2), state(params(logprobs=1), 3)]
    result = Sampler(300).sample(logits, states)
    assert result.token_ids[2] == -1
    assert (result.token_ids[[0, 1, 3]] >= 0).all()
    assert set(result.logprobs) == {3}
    assert states[2] is not None
    assert states[2].num_output_tokens == 0


def test_rows_of_minus_infinity_fail() -> None:
    assert Sampler(10).sample(np.full((1, 10), -np.inf, np.float32), [None]).token_ids[0] == -1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-300},
        {"temperature": 1e-4, "top_k": 5, "top_p": 0.9, "min_p": 0.5},
        {"logit_bias": {3: 100.0}},
        {"top_p": 1e-12},
        {"min_p": 1.0},
        {"top_k": 1},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e37])
def test_extremes_give_the_largest_logit_without_warnings(settings: dict[str, Any], scale: float) -> None:
    logits = random_logits(1, 700, seed=9)[0]
    logits *= np.float32(scale)
    p = params(**settings)
    likeliest = int(adjusted(logits, p, [], [], EOS).argmax())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = draw_many(logits, p, 50)
    assert set(drawn.tolist()) == {likeliest}


def test_forbidden_tokens_are_not_drawn() -> None:
    logits = np.zeros(300, np.float32)
    bias = {token: -100.0 for token in range(300) if token not in (17, 255)}
    assert set(draw_many(logits, params(logit_bias=bias), 200).tolist()) == {17, 255}


@pytest.mark.parametrize("vocab", [50, 1500])
def test_logprobs_are_those_of_the_unscaled_logits(vocab: int) -> None:
    logits = random_logits(3, vocab)
    p = params(temperature=0.3, logit_bias={4: 50.0}, logprobs=5)
    result = Sampler(vocab).sample(logits, [state(p, n) for n in range(3)])
    for row in range(3):
        wide = logits[row].astype(np.float64)
        wanted = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
        entry = result.logprobs[row]
        assert entry.token_id == result.token_ids[row] == 4
        assert entry.logprob == pytest.approx(wanted[4], abs=1e-5)
        assert entry.rank == 1 + int((wanted > wanted[4]).sum())
        assert [token for token, _ in entry.top] == np.argsort(-wanted)[:5].tolist()
        assert [value for _, value in entry.top] == pytest.approx(sorted(wanted)[::-1][:5], abs=1e-5)


def test_no_top_logprobs_are_none_at_all() -> None:
    result = Sampler(50).sample(random_logits(1, 50), [state(params(temperature=0.0, logprobs=0))])
    assert result.logprobs[0].top == []
    assert result.logprobs[0].rank == 1


def test_plain_greedy_needs_no_state() -> None:
    assert state(params(temperature=0.0)) is None
    assert state(params(temperature=0.0, top_p=0.5, top_k=3)) is None
    assert state(params(temperature=0.0, logprobs=0)) is not None


@pytest.mark.parametrize("width", [256, 1024])
def test_inverse_cdf_never_gives_a_token_without_weight(width: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.random((200, width)).astype(np.float32) * (rng.random((200, width)) < 0.01)
    weights[np.arange(200), rng.integers(0, width, 200)] = 1e-3
    for numbers in (np.zeros(200), np.full(200, 1 - 2.0**-53), rng.random(200)):
        ids = _inverse_cdf(weights, numbers)
        assert (weights[np.arange(200), ids] > 0).all()
        sums = np.cumsum(weights, axis=1, dtype=np.float64)
        wanted = (sums <= (numbers * sums[:, -1])[:, None]).sum(axis=1)
        assert (ids == wanted).mean() > 0.99  # float32 sums of blocks round
    assert _inverse_cdf(weights, np.zeros(200)).tolist() == (weights > 0).argmax(axis=1).tolist()
