"""Greedy tokens are those of transformers' own generate, whatever the steps are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engine import Driver
from support.models import load_reference, reference_answers, reference_tokens
from unit.engines.torch.families import FAMILIES, make_family

PROMPTS = [[3 + (7 * j + 13 * i) % 290 for j in range(30 + 17 * i)] for i in range(3)]


@pytest.mark.families("gemma2", "gpt_oss", "qwen3_moe", "phi3", "cohere2")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str, tmp_path: Path, make_runner: Any) -> None:
    make_family(tmp_path, family)
    reference = load_reference(tmp_path)
    runner = make_runner(tmp_path, block_size=16)
    for budget in (3, 256):
        driver = Driver(runner, max_num_seqs=3, max_num_batched_tokens=budget, enable_prefix_caching=True)
        ids = [driver.add(prompt, 12)[0] for prompt in PROMPTS]
        driver.run()
        found = [driver.tokens[i] for i in ids]
        assert found == reference_answers(reference, PROMPTS, 12, found)
        assert len({token for tokens in found for token in tokens}) > 5


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt_oss"])
def test_prefix_hits_beyond_a_window(family: str, tmp_path: Path, make_runner: Any) -> None:
    make_family(tmp_path, family)
    reference = load_reference(tmp_path)
    driver = Driver(make_runner(tmp_path, block_size=16), max_num_seqs=3, enable_prefix_caching=True)
    for tail in (5, 6):
        prompt = [*PROMPTS[2], tail]
        [request] = driver.add(prompt, 10)
        driver.run()
        assert driver.tokens[request] == reference_tokens(reference, prompt, 10, guess=driver.tokens[request])
    assert driver.stats.prefix_hits == len(PROMPTS[2]) // 16 * 16


def test_two_models_in_one_process(tmp_path: Path, make_runner: Any) -> None:
    """Each model's layers know whose they are."""
    folders = [make_family(tmp_path / family, family) for family in ("olmo2", "gemma2")]
    drivers = [Driver(make_runner(folder), max_num_seqs=2) for folder in folders]
    ids = [driver.add(PROMPTS[1], 8)[0] for driver in drivers]
    while any(driver.core.has_work or not driver.ends for driver in drivers):
        for driver in drivers:
            driver.step()
    for folder, driver, request in zip(folders, drivers, ids, strict=True):
        assert driver.tokens[request] == reference_tokens(load_reference(folder), PROMPTS[1], 8)
