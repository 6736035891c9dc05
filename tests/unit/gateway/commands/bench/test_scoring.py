"""Windows of a text, log-probabilities of their tokens, and how far distributions are from each other."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.core import EngineCore
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.commands.bench.perplexity_bench import Scorer, TextWindow, kl_divergences, windows
from penstock.gateway.commands.bench.text import first_token, library_text
from penstock.gateway.models.language.models import find_model


@given(
    count=st.integers(0, 60),
    length=st.integers(2, 20),
    stride=st.integers(1, 20),
    first=st.sampled_from([None, 7]),
)
def test_every_token_counts_once(count: int, length: int, stride: int, first: int | None) -> None:
    text = list(range(100, 100 + count))
    stride = min(stride, length - 1)
    found = list(windows(text, length, stride, first))
    counted = [token for window in found for token in window.token_ids[-window.num_new :]]
    assert counted == (text[1:] if first is None else text)
    for window in found:
        assert len(window.token_ids) <= length
        assert 0 < window.num_new < len(window.token_ids)
        assert first is None or window.token_ids[0] == first


def test_later_windows_have_what_was_before_as_context() -> None:
    found = list(windows(range(10), 6, 3))
    assert found == [TextWindow([0, 1, 2, 3, 4, 5], 5), TextWindow([3, 4, 5, 6, 7, 8], 3), TextWindow([6, 7, 8, 9], 1)]


@pytest.fixture
def core() -> EngineCore:
    folder = find_model(None).folder
    runner = OpenVINORunner(OpenVINOConfig(folder, dtype="f32", threads=1, num_blocks=32, max_num_seqs=1))
    return EngineCore(runner, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16), time.monotonic)


def test_distributions_are_those_of_the_tokens_that_count(core: EngineCore) -> None:
    """Also where a prompt is computed in several steps, and where only its end counts."""
    scorer = Scorer(core)
    assert scorer.has_distributions
    text = [3 + 7 * n % 250 for n in range(50)]
    whole, _ = scorer.distributions(TextWindow(text, 49))
    assert len(whole) == 49
    for num_new in (49, 20, 1):
        logprobs, logits = scorer.distributions(TextWindow(text, num_new))
        assert logprobs == pytest.approx(whole[49 - num_new :], abs=1e-5)
        assert logits.shape == (num_new, core.info.vocab_size)
        shifted = logits - logits.max(axis=1, keepdims=True)
        by_hand = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        targets = text[50 - num_new :]
        assert by_hand[range(num_new), targets].tolist() == pytest.approx(logprobs, abs=1e-4)
    assert isinstance(core.runner, StepRunner)
    assert core.runner.watch_prompt_logits is None, "nobody watches any more"
    core.close()


@pytest.mark.parametrize(("added", "expected"), [([1], 1), ([], None)])
def test_the_token_that_begins_a_text(added: list[int], expected: int | None) -> None:
    class Beginning:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [*(added if add_special_tokens else []), 5, *([2] if add_special_tokens else [])]

    assert first_token(Beginning()) == expected  # type: ignore[arg-type]


def test_divergence_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    logits = np.log(np.array([p, q, p], np.float32))
    others = np.log(np.array([p, p, q], np.float32)) + np.float32(5)  # what all have in common does not matter
    lost = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert kl_divergences(logits, others).tolist() == pytest.approx([0, lost, lost], abs=1e-6)
    skewed = kl_divergences(np.log(np.array([[0.9, 0.1]], np.float32)), np.log(np.array([[0.5, 0.5]], np.float32)))
    assert skewed.tolist() == pytest.approx([0.9 * math.log(1.8) + 0.1 * math.log(0.2)], rel=1e-5)


def test_divergences_of_many_rows_keep_their_order() -> None:
    random = np.random.default_rng(0)
    reference, other = random.standard_normal((2, 70, 5), np.float32)
    expected = [kl_divergences(reference[n : n + 1], other[n : n + 1])[0] for n in range(70)]
    assert kl_divergences(reference, other).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["docstrings", "sources"])
def test_the_library_s_text_is_the_same_each_time_and_of_many_modules(kind: str) -> None:
    text = library_text(kind, 30_000)
    assert 30_000 <= len(text) <= 34_000
    assert library_text(kind, 30_000) == text
    assert text.startswith(library_text(kind, 5_000))
    assert (text.count("\ndef ") > 5) == (kind == "sources")
