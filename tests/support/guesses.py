"""Answers of an engine that verifies guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engines.contract.engine_stats import EngineStats
from support.engine import Driver


def guessed(
    runner: Any,
    prompts: Sequence[Sequence[int]],
    speculative: str,
    predictions: Sequence[Sequence[int]] = (),
    count: int = 40,
) -> tuple[list[list[int]], EngineStats]:
    """`count` greedy tokens behind each prompt, of requests that run together. `predictions`: what each says that its
    will be."""
    driver = Driver(runner, max_num_seqs=4, max_num_batched_tokens=64, speculative=speculative)
    ids = [
        driver.add(tokens, count, prediction=tuple(predictions[n]) if predictions else ())[0]
        for n, tokens in enumerate(prompts)
    ]
    driver.run()
    return [driver.tokens[i] for i in ids], driver.stats
