"""Prompt lookup: what is guessed, and how guessing adapts to how good the guesses are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.engines.contract.step import TO_BE_DRAFTED
from penstock.engines.core import EngineCore
from penstock.engines.errors import UnsupportedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.guessers import MAX_VOCAB_SIZE, DraftModelGuesses, PredictedOutput, PromptLookup
from unit.engines.scheduler.harness import FIRST, RAISE, Clock, alone, make_rig


def test_what_followed_the_newest_tokens_before_is_guessed() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 9, 1, 2, 3], 8)
    assert lookup.guess(8) == [4, 5, 9]
    assert lookup.guess(2) == [4, 5]
    assert lookup.guess(0) == []


def test_the_longest_match_counts_and_of_equal_ones_the_newest() -> None:
    assert PromptLookup([1, 2, 3, 4, 7, 0, 3, 4, 8, 1, 2, 3, 4], 1).guess(1) == [7], "four tokens match there"
    assert PromptLookup([3, 4, 7, 0, 3, 4, 8, 0, 3, 4], 1).guess(1) == [8]


def test_one_token_is_no_match() -> None:
    assert PromptLookup([1, 2, 3, 1], 8).guess(8) == []
    assert PromptLookup([1], 8).guess(8) == []


def test_a_match_lies_on_the_border_of_a_token() -> None:
    """0x00000001 three times holds the bytes of 0x00000100 twice."""
    assert PromptLookup([1, 1, 1, 7, 256, 256], 8).guess(8) == []


def test_every_token_id_of_a_vocabulary_can_be_guessed() -> None:
    ids = [0, 0xD800, 0xFEFF, 0xFFFF, MAX_VOCAB_SIZE - 1]
    assert PromptLookup([7, 8, *ids, 7, 8], 8).guess(3) == ids[:3]
    lookup = PromptLookup([9, 9], 8)
    lookup.append([*ids, 0, 0xD800])
    assert lookup.guess(3) == ids[2:]


def test_what_repeats_itself_goes_on() -> None:
    assert PromptLookup([1, 2, 1, 2, 1, 2], 8).guess(8) == [1, 2, 1]


def follow(lookup: PromptLookup, say: Callable[[int], int], count: int, limit: int = 8) -> tuple[int, int, int]:
    """Generates tokens with guesses: how many steps that took, and how many guesses were made and right."""
    steps = guessed = right = number = 0
    while number < count:
        guesses = lookup.guess(limit)
        tokens: list[int] = []
        for guess in [*guesses, None]:
            tokens.append(say(number + len(tokens)))
            if tokens[-1] != guess:
                break
        lookup.append(tokens)
        if guesses:
            lookup.verified(len(guesses), len(tokens) - 1)
        steps, guessed, right, number = steps + 1, guessed + len(guesses), right + len(tokens) - 1, number + len(tokens)
    return steps, guessed, right


def test_who_quotes_needs_few_steps() -> None:
    quoted = random.Random(0).sample(range(1000), 200)
    steps, guessed, right = follow(PromptLookup([*quoted, *quoted[:2]], 8), lambda n: quoted[2 + n], 190)
    assert steps <= 190 / 8 + 3
    assert right == guessed


def test_who_never_quotes_is_left_alone() -> None:
    """Every pair of tokens has occurred, what followed it never follows again."""
    rng = random.Random(0)
    lookup = PromptLookup([rng.randrange(8) for _ in range(500)], 8)
    wrong = [token % 8 for token in (rng.randrange(8) for _ in range(4000))]
    steps, guessed, _ = follow(lookup, lambda n: wrong[n], 2000)
    assert steps > 1500
    assert guessed < 0.2 * steps


def test_guesses_that_are_all_wrong_become_rare() -> None:
    lookup = PromptLookup([1, 2, 3] * 10, 8)
    guessed = 0
    for number in range(2000):
        guesses = lookup.guess(8)
        guessed += len(guesses)
        lookup.append([1, 2][number % 2 : number % 2 + 1])
        if guesses:
            lookup.verified(len(guesses), 0)
    assert 0 < guessed < 30


def test_after_a_pause_guessing_starts_again() -> None:
    lookup = PromptLookup([1, 2, 3] * 10, 8)
    for _ in range(20):
        lookup.append([1])
        if guesses := lookup.guess(8):
            lookup.verified(len(guesses), 0)
    assert not lookup.guess(8)
    steps, _, right = follow(lookup, lambda n: n % 3, 2000)
    assert right > 1000
    assert steps < 1000


def test_guesses_that_are_gone_when_they_could_be_made_become_rare() -> None:
    lookup = PromptLookup([1, 2, 3] * 10, 8)
    waits = 0
    for _ in range(2000):
        if lookup.guess(8):
            waits += 1
            lookup.missed()
        lookup.append([1, 2, 3])
    assert 0 < waits < 30


def test_acceptance_follows_what_was_right() -> None:
    lookup = PromptLookup([1, 2, 3] * 10, 8)
    for right, guessed in ((1, 4), (4, 4), (2, 8)):
        for _ in range(40):
            lookup.verified(guessed, right)
        assert lookup.acceptance == pytest.approx(right / guessed, abs=0.01)


def test_after_a_pause_guesses_get_another_chance() -> None:
    lookup = PromptLookup([1, 2, 3] * 10, 8)
    lookup.verified(2, 0)
    assert lookup.acceptance < 0.5
    for _ in range(5):
        lookup.verified(1, 0)
    assert not lookup.guess(8)
    assert lookup.acceptance == 0.5


def test_a_draft_model_is_asked_as_far_as_it_was_right() -> None:
    guesses = DraftModelGuesses(8)
    assert guesses.guess(8) == [TO_BE_DRAFTED] * 3
    for asked in (6, 8, 8):
        guesses.append([1] * 9)
        guesses.verified(len(guesses.guess(8)), len(guesses.guess(8)))
        assert len(guesses.guess(8)) == asked
    assert len(guesses.guess(2)) == 2
    guesses.append([1, 2])
    guesses.verified(8, 1)
    assert len(guesses.guess(8)) == 2
    for _ in range(3):
        guesses.append([1])
        guesses.verified(len(guesses.guess(8)) or 1, 0)
    assert not guesses.guess(8), "all wrong: a pause"


def test_what_a_draft_model_guesses_behind_a_wrong_token_is_not_held_against_it() -> None:
    guesses = DraftModelGuesses(8)
    for _ in range(40):
        guesses.verified(8, 3)
    assert guesses.acceptance == pytest.approx(3 / 4, abs=0.01)


def test_a_draft_model_gets_another_chance() -> None:
    """Also where its guesses are not worth it any more, so that none is verified."""
    guesses = DraftModelGuesses(8)
    for _ in range(3):
        guesses.verified(1, 0)
    before = guesses.acceptance
    guesses.append([1] * 1000)
    for _ in range(300):
        guesses.append([1])
    assert guesses.acceptance > max(before, 0.7)


# -- in the scheduler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("end", ["stop", "max_tokens", "context"])
def test_guesses_beside_the_end(depth: int, end: str) -> None:
    """A model with two words, which quotes itself often."""
    rig = make_rig(
        400,
        eos=(FIRST + 1,) if end == "stop" else (),
        vocab_size=FIRST + 2,
        speculative="ngram",
        steps_in_flight=depth,
    )
    prompt = [FIRST, FIRST + 1] * (498 if end == "context" else 20)
    requests = [rig.request([i, *prompt], max_tokens=3 if end == "context" else 1 + 3 * i) for i in range(6)]
    rig.run(*requests)
    for request in requests:
        eos = (FIRST + 1,) if end == "stop" else ()
        assert (
            rig.tokens[request.ids[0]]
            == alone(request.prompt_token_ids, request.params, eos=eos, vocab_size=FIRST + 2)[0]
        )
    assert rig.scheduler.stats().draft_tokens


def test_guesses_stay_within_the_budget_of_a_step() -> None:
    rig = make_rig(200, max_num_seqs=4, max_num_batched_tokens=6, vocab_size=FIRST + 1, speculative="ngram")
    rig.run(*(rig.request([FIRST] * 8, max_tokens=20) for _ in range(6)))
    totals = [step.total_num_scheduled_tokens for step in rig.runner.steps]  # none above 6: the runner looks
    assert max(totals) == 6
    assert rig.scheduler.stats().accepted_tokens


def test_no_guess_follows_one_token_of_a_prompt() -> None:
    """The share of a prompt that is not done by it; the step has room for a guess."""
    rig = make_rig(
        200,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        vocab_size=FIRST + 1,
        speculative="ngram",
        enable_prefix_caching=False,
    )
    for length in (23, 60, 60, 70):
        rig.step(rig.request([FIRST] * length, max_tokens=3))
    assert rig.counts() == {1: 4, 2: 1, 4: 4}
    assert rig.last.drafts == {}
    rig.run()
    assert rig.scheduler.stats().draft_tokens


def test_nobody_takes_turns_with_one_that_verifies() -> None:
    rig = make_rig(64, vocab_size=FIRST + 1, speculative="ngram", steps_in_flight=2)
    rig.step(rig.request([FIRST] * 9, max_tokens=40), rig.request([1, 2, 3], max_tokens=4))
    rig.scheduler.intake.requests[2].looks_ahead = False  # it has nothing to guess
    while 2 not in rig.ended:
        rig.step()
        assert set(rig.counts()) == {1, 2}
    rig.run()


@pytest.mark.parametrize("fails", [False, True])
def test_steps_overlap_again_when_there_is_nothing_to_guess_any_more(fails: bool) -> None:
    """After a step that verified, and after one that would have and failed."""
    rig = make_rig(64, vocab_size=FIRST + 1, speculative="ngram", steps_in_flight=2)
    rig.step(rig.request([FIRST] * 9, max_tokens=60))
    rig.step(*([rig.request([RAISE])] if fails else []))
    assert set(rig.last.drafts) == {1}
    rig.scheduler.intake.requests[1].looks_ahead = False
    while fails and 2 not in rig.ended:
        rig.step()
    rig.step()
    assert len(rig.scheduler.under_way) == 1
    rig.run()


def test_nobody_is_preempted_for_a_guess() -> None:
    rig = make_rig(6, 4, max_num_seqs=2, vocab_size=FIRST + 1, speculative="ngram", enable_prefix_caching=False)
    rig.run(rig.request([FIRST] * 7, max_tokens=5), rig.request([FIRST] * 7, max_tokens=5))
    assert rig.scheduler.stats().draft_tokens
    assert not rig.scheduler.stats().preemptions


def test_steps_are_seldom_held_back_for_guesses_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a match for every other token, always before the newest one is known."""
    monkeypatch.setattr("penstock.engines.scheduler.guessers._find_last", lambda text, size: -1 if len(text) % 2 else 0)
    rig = make_rig(100, speculative="ngram", steps_in_flight=2)
    behind_another = []
    rig.runner.before = lambda step: behind_another.append(len(rig.runner._under_way))
    rig.run(rig.request([FIRST] * 9, max_tokens=200))
    assert rig.scheduler.stats().draft_tokens < 20
    assert behind_another.count(0) < 30


def test_a_vocabulary_that_is_too_large_gets_no_guesses() -> None:
    rig = make_rig(100, vocab_size=MAX_VOCAB_SIZE + 8, speculative="ngram")
    request = rig.request([MAX_VOCAB_SIZE + 1, 3, 4, 3, 4, 3], max_tokens=4)
    rig.run(request)
    assert rig.tokens[1] == alone(request.prompt_token_ids, request.params, vocab_size=MAX_VOCAB_SIZE + 8)[0]
    assert not rig.scheduler.stats().draft_tokens


def test_an_engine_that_cannot_verify_says_so_at_once() -> None:
    rig = make_rig()
    rig.runner.info = type(rig.runner.info)(
        **{name: getattr(rig.runner.info, name) for name in rig.runner.info.__struct_fields__}
        | {"supports_drafts": False}
    )
    with pytest.raises(UnsupportedError, match="speculative"):
        EngineCore(rig.runner, SchedulerConfig(speculative="ngram"), Clock())


def test_a_prediction_is_followed_from_its_beginning() -> None:
    lookup = PredictedOutput([1, 2, 3, 4, 5, 6, 7, 8], 8)
    assert lookup.guess(8) == [1, 2, 3]
    lookup.append([1, 2])
    assert lookup.guess(2) == [3, 4]
    lookup.append([3, 4, 5, 6, 7, 8])
    assert lookup.guess(8) == []


def test_behind_a_difference_the_prediction_goes_on_where_the_output_does() -> None:
    lookup = PredictedOutput([1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 9], 8)
    lookup.append([1, 2, 50])
    assert lookup.guess(8) == []
    lookup.append([4, 5, 6])
    assert lookup.guess(8) == [], "four tokens are a match"
    lookup.append([7])
    assert lookup.guess(8) == [8, 4, 5], "the next place, not the last"
    lookup.append([60, 4, 5, 6, 7])
    assert lookup.guess(8) == [9], "no place that the output has passed"


def test_of_a_prediction_right_and_wrong_guesses_are_counted() -> None:
    lookup = PredictedOutput(range(20), 4)
    lookup.append([0, 1, 99])
    lookup.verified(3, 2)
    lookup.verified(2, 2)
    assert (lookup.num_right, lookup.num_wrong) == (4, 1)
