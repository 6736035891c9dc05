from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.kit.sampling import Sampler, SamplingState, token_logprobs_rows
from penstock.engines.kit.sampling.drawing import DrawingBuffers, _Nucleus
from unit.engines.sampling.oracle import adjusted, distribution

EOS = (2,)


@pytest.fixture(autouse=True, scope="module", params=["small", "large"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Vocabularies of a few thousand tokens, drawn from as such and as if they were large."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large":
            patch.setattr("penstock.engines.kit.sampling.drawing._SMALL_VOCABULARY", 0)
        yield


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
    return Sampler(len(logits)).sample(batch, [state(p, seed) for seed in range(count)])


def sample_and_keep(logits: Any, requests: list[SamplingState | None]) -> list[int]:
    """One token for each request, appended to its state."""
    return [
        extension.token_ids[0] for extension in Sampler(logits.shape[1]).extend(logits, requests, [[]] * len(requests))
    ]


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


def test_a_nucleus_ends_with_the_token_that_completes_it() -> None:
    assert set(draw_many(np.zeros(4, np.float32), params(top_p=0.5), 300).tolist()) == {0, 1}


def test_a_flat_nucleus_is_exactly_as_large_as_it_must_be() -> None:
    logits = np.zeros(5000, np.float32)
    drawn = draw_many(logits, params(top_p=0.01), 2000)
    assert set(drawn.tolist()) == set(range(50))


def test_greedy_rows_of_a_mixed_batch_stay_the_argmax() -> None:
    logits = random_logits(40, 1000)
    states = [state(params(temperature=0.0 if row % 2 else 1.5), row) for row in range(40)]
    drawn = Sampler(1000).sample(logits, states)
    assert (drawn[1::2] == logits[1::2].argmax(axis=1)).all()
    assert (drawn[::2] != logits[::2].argmax(axis=1)).any()


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_a_seeded_token_does_not_depend_on_its_row_or_its_mates(vocab: int) -> None:
    logits = random_logits(9, vocab)
    p = params(temperature=1.2, top_p=0.97)
    sampler = Sampler(vocab)
    alone = [int(sampler.sample(logits[n : n + 1], [state(p, n)])[0]) for n in range(9)]
    together = sampler.sample(logits, [state(p, n) for n in range(9)]).tolist()
    backwards = sampler.sample(logits[::-1], [state(p, 8 - n) for n in range(9)]).tolist()
    greedy_between = sampler.sample(
        np.repeat(logits, 2, axis=0), [state(p, n // 2) if n % 2 else None for n in range(18)]
    ).tolist()
    assert together == alone
    assert backwards[::-1] == alone
    assert greedy_between[1::2] == alone


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 20, "frequency_penalty": 1.0}, {"min_p": 0.2}])
def test_threads_change_nothing(settings: dict[str, Any]) -> None:
    logits = random_logits(21, 5000, scale=1.0)
    states = [state(params(**settings), row, output=(row, 3)) for row in range(21)]
    alone = Sampler(5000).sample(logits, states).tolist()
    for num_threads in (2, 4):
        assert Sampler(5000, num_threads).sample(logits, states).tolist() == alone


def test_a_resumed_request_draws_what_it_would_have_drawn() -> None:
    logits = random_logits(6, 500)
    p = params(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.2)
    whole = state(p, 7, prompt=(1, 2))
    tokens = [sample_and_keep(logits[n : n + 1], [whole])[0] for n in range(6)]
    resumed = state(p, 7, prompt=(1, 2), output=tuple(tokens[:3]))
    assert [sample_and_keep(logits[n : n + 1], [resumed])[0] for n in range(3, 6)] == tokens[3:]


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


def test_penalties_know_every_token_of_a_long_output() -> None:
    p = params(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits, output = random_logits(1, 500)[0], [*[7] * 5, *range(300)]
    growing = state(p)
    assert growing is not None
    for token in output:
        growing.append(token)
    row = logits.copy()
    growing.adjust(row)
    np.testing.assert_allclose(row, adjusted(logits, p, [], output, EOS), rtol=1e-4, atol=1e-4)


def test_min_tokens_keeps_stop_tokens_out_until_then() -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, 2], logits[0, 5], logits[0, 7] = 9, 8, 7
    greedy = state(params(temperature=0.0, min_tokens=2, stop_token_ids=(5,)))
    assert [sample_and_keep(logits, [greedy])[0] for _ in range(4)] == [7, 7, 2, 2]
    with_eos = state(params(temperature=0.0, min_tokens=2, stop_token_ids=(5,), ignore_eos=True))
    assert sample_and_keep(logits, [with_eos]) == [2]


@pytest.mark.parametrize("writeable", [True, False])
def test_logits_are_as_before(writeable: bool) -> None:
    logits = random_logits(4, 300)
    logits.flags.writeable = writeable
    before = logits.copy()
    p = params(logit_bias={1: 5.0}, repetition_penalty=1.5, top_p=0.5, min_tokens=3)
    Sampler(300).sample(logits, [state(p, n, prompt=(1, 2)) for n in range(4)])
    assert (logits == before).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 123, 299])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0, "frequency_penalty": 1.0}])
def test_rows_that_are_not_finite_are_told_apart(poison: float, place: int, settings: dict[str, Any]) -> None:
    logits = random_logits(4, 300)
    logits[2, place] = poison
    states = [None, state(params(), 1), state(params(**settings), 2), state(params(), 3)]
    extensions = Sampler(300).extend(logits, states, [[]] * 4)
    assert [extension.finite for extension in extensions] == [True, True, False, True]
    assert [len(extension.token_ids) for extension in extensions] == [1, 1, 0, 1]
    assert [s.num_output_tokens for s in states if s is not None] == [1, 0, 1]


def test_rows_of_minus_infinity_fail() -> None:
    assert Sampler(10).sample(np.full((1, 10), -np.inf, np.float32), [None])[0] == -1


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


@pytest.mark.parametrize("vocab", [3, 50, 1500, 70_000])
@pytest.mark.parametrize("round_to", [None, 0.5])
def test_logprobs_are_those_of_the_logits(vocab: int, round_to: float | None) -> None:
    logits = random_logits(70, vocab)
    if round_to is not None:  # many ties, of which the first ids come first
        logits = np.round(logits / round_to).astype(np.float32) * np.float32(round_to)
    tokens = np.random.default_rng(1).integers(0, vocab, 70)
    top = np.arange(70) % 8
    entries = token_logprobs_rows(logits, tokens, top)
    assert token_logprobs_rows(logits[8:9], tokens[8:9], 0) == [entries[8]]
    for row, token, count, entry in zip(logits, tokens.tolist(), top.tolist(), entries, strict=True):
        wide = row.astype(np.float64)
        wanted = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
        best = np.lexsort((np.arange(vocab), -wide))[:count]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(wanted[token], abs=1e-5)
        assert entry.rank == 1 + int((wanted > wanted[token]).sum())
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(wanted[best].tolist(), abs=1e-5)


def test_plain_greedy_needs_no_state() -> None:
    assert state(params(temperature=0.0)) is None
    assert state(params(temperature=0.0, top_p=0.5, top_k=3)) is None
    assert state(params(temperature=0.0, logprobs=0)) is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "frequency_penalty": 1.5, "min_tokens": 2},
        {"temperature": 1.5, "top_p": 0.9, "min_tokens": 3},
        {"temperature": 1.5, "repetition_penalty": 2.0, "presence_penalty": 1.0},
    ],
)
def test_drafts_change_nothing_but_the_number_of_steps(settings: dict[str, Any]) -> None:
    """Right and wrong drafts, several at once, give the tokens that sampling one by one gives."""
    vocab, length = 40, 12
    logits = random_logits(3 * length, vocab).reshape(3, length, vocab)
    p = params(**settings)
    one_by_one = [
        [sample_and_keep(rows[n : n + 1], [s])[0] for n in range(length)]
        for rows, s in zip(logits, [state(p, 5, (1, 2)), state(p, 6, (3,)), None], strict=True)
    ]
    states = [state(p, 5, (1, 2)), state(p, 6, (3,)), None]
    rng, output = np.random.default_rng(0), [[], [], []]
    while min(map(len, output)) < length:
        left = [r for r in range(3) if len(output[r]) < length]
        drafts = []
        for r in left:
            guesses = one_by_one[r][len(output[r]) : len(output[r]) + int(rng.integers(0, 5))][
                : length - len(output[r]) - 1
            ]
            drafts.append([(guess + int(rng.random() < 0.2)) % vocab for guess in guesses])
        rows = np.concatenate(
            [logits[r, len(output[r]) : len(output[r]) + 1 + len(d)] for r, d in zip(left, drafts, strict=True)]
        )
        extensions = Sampler(vocab).extend(rows, [states[r] for r in left], drafts)
        for r, guesses, extension in zip(left, drafts, extensions, strict=True):
            truth = one_by_one[r][len(output[r]) :]
            right = [guess == token for guess, token in zip(guesses, truth, strict=False)]
            assert len(extension.token_ids) == 1 + [*right, False].index(False)
            output[r] += extension.token_ids
    assert output == one_by_one


def test_a_row_that_is_not_finite_counts_only_if_its_draft_was_right() -> None:
    logits = random_logits(3, 20)
    logits[2] = np.nan
    right = logits[:2].argmax(axis=1).tolist()
    wrong = [right[0], right[1] + 1]
    first, second = Sampler(20).extend(np.concatenate([logits, logits]), [None, None], [right, wrong])
    assert (first.finite, first.token_ids) == (False, right)
    assert (second.finite, second.token_ids) == (True, right)


@pytest.mark.parametrize("way", ["large"], indirect=True)
@pytest.mark.parametrize("scale", [0.0, 0.05, 0.6, 3.0, 12.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.7},
        {"top_p": 0.02},
        {"top_p": 0.999},
        {"min_p": 0.3},
        {"min_p": 0.05, "top_p": 0.8},
        {"top_k": 50},
        {"top_k": 3000},
        {"top_k": 3000, "top_p": 0.6},
        {"top_p": 0.9, "temperature": 40.0},
        {"min_p": 1e-6, "temperature": 0.3},
    ],
)
def test_draws_from_a_large_vocabulary_follow_the_distribution(settings: dict[str, Any], scale: float) -> None:
    """Over 5,003 tokens, some of them impossible, in bins of about the same probability."""
    logits = random_logits(1, 5003, seed=3, scale=scale)[0]
    logits[::7] = -np.inf
    p = params(**settings)
    wanted = distribution(logits, p)
    drawn = draw_many(logits, p, 800)
    assert (wanted[drawn] > 0).all() or wanted[wanted > 0].min() < 1e-9
    # By probability and by id: a way of drawing that neglects either end of one of them shows in the bins.
    for order in (np.argsort(-wanted, kind="stable"), np.random.default_rng(2).permutation(len(logits))):
        ends = np.cumsum(wanted[order])
        places = np.empty(len(order), np.int64)
        places[order] = np.minimum((ends - wanted[order] / 2) * 20, 19).astype(np.int64)
        expected = np.bincount(places, wanted, 20) * 800
        observed = np.bincount(places[drawn], minlength=20)
        some = expected > 0
        assert not observed[~some].any()
        statistic = ((observed[some] - expected[some]) ** 2 / expected[some]).sum()
        assert statistic <= some.sum() + 4 * np.sqrt(2 * some.sum())


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 400),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 100.0]),
    round_to=st.sampled_from([0.0, 0.25, 2.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 30.0]),
    top_p=st.floats(0.001, 0.9999),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    forbidden=st.integers(0, 5),
)
def test_the_nucleus_is_that_of_the_oracle(
    seed: int, vocab: int, scale: float, round_to: float, temperature: float, top_p: float, min_p: float, forbidden: int
) -> None:
    """What rejection asks of each token, here of all of them."""
    logits = random_logits(1, vocab, seed, scale)[0]
    if round_to:
        logits = np.round(logits / np.float32(round_to)) * np.float32(round_to)
    logits[seed % vocab + 1 : seed % vocab + 1 + forbidden] = -np.inf
    peak = logits.max()
    least = -np.inf if min_p == 0 else float(peak) + temperature * np.log(min_p)
    nucleus = _Nucleus(logits, peak, np.float32(least), temperature, top_p, DrawingBuffers(vocab))
    found = {
        token
        for token in range(vocab)
        if logits[token] >= np.float32(least) and nucleus.first(np.array([token])) == token
    }
    narrow, wide = (
        set(np.flatnonzero(distribution(logits, params(temperature=temperature, top_p=p, min_p=m))).tolist())
        for p, m in (
            (top_p * (1 - 1e-5), min_p * (1 + 1e-5) if min_p < 1 else 1.0),
            (min(1.0, top_p * (1 + 1e-5)), min_p * (1 - 1e-5)),
        )
    )
    assert narrow <= found <= wide


def test_a_long_tail_counts_however_unlikely_each_of_its_tokens_is() -> None:
    """Half of the probability on one token, half on 49,999: the nucleus of 0.9 has four fifths of them."""
    logits = random_logits(1, 50_000, seed=4, scale=0.01)[0]
    logits[1234] = np.log(50_000)
    drawn = draw_many(logits, params(top_p=0.9), 300)
    # 5/9 of 300, with a deviation of 8.6
    assert 140 <= (drawn == 1234).sum() <= 193
    assert len(set(drawn.tolist())) > 90
