"""Prompts that one runner computes and another one goes on with: the tokens are those of one runner alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.core import EngineCore
from penstock.engines.handover.memory import HandoverMemory
from support.engine import Driver
from support.models import load_reference, make_model, reference_tokens
from support.runner import prompt

PROMPT = prompt(100, 1)
"""Three blocks, and four tokens more."""


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("windows"), "mistral", sliding_window=40)


def pair(make_runner: Any, model: Path, memory: HandoverMemory, **runner: Any) -> list[Driver]:
    return [Driver(make_runner(model, num_blocks=10, **runner), handover=memory.config(own)) for own in (0, None)]


def close(drivers: list[Driver]) -> None:
    for driver in drivers:
        assert isinstance(driver.core, EngineCore)
        assert driver.core.blocks is not None
        driver.core.blocks.close(save=False)


def ask(driver: Driver, count: int, behind: list[int] | None = None) -> list[int]:
    [request] = driver.add(PROMPT, count, behind=behind or [])
    driver.run()
    return driver.tokens[request]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_are_the_same(family: str, llama_dir: Path, mistral_dir: Path, make_runner: Any) -> None:
    model = llama_dir if family == "llama" else mistral_dir
    expected = reference_tokens(load_reference(model), PROMPT, 8)
    memory = HandoverMemory(1, 1 << 24)
    first, second = drivers = pair(make_runner, model, memory)
    token = ask(first, 1)
    assert [*token, *ask(second, 8, token)] == expected
    assert second.stats.prompt_tokens == 4
    assert second.stats.handover.missed_tokens == 0
    close(drivers)


@pytest.mark.parametrize("kind", ["u8", "u4"])
def test_quantized_blocks_are_the_same(kind: str, llama_dir: Path, make_runner: Any) -> None:
    """As for a request that finds them in its own cache: a prompt that is computed whole rounds otherwise."""
    memory = HandoverMemory(1, 1 << 24)
    first, second = drivers = pair(make_runner, llama_dir, memory, kv_cache_dtype=kind)
    token = ask(first, 1)
    assert ask(second, 8, token) == ask(first, 8, token)
    assert second.stats.prompt_tokens == 4
    drivers += pair(make_runner, llama_dir, memory)
    ask(drivers[3], 8, token)
    assert drivers[3].stats.prompt_tokens == len(PROMPT), "blocks of another type are not used"
    close(drivers)


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_states_are_handed_over_with_their_blocks(family: str, make_runner: Any, tmp_path: Path) -> None:
    """The tokens behind the last checkpoint are computed again."""
    make_model(tmp_path, family)
    expected = reference_tokens(load_reference(tmp_path), PROMPT, 8)
    first, second = drivers = pair(make_runner, tmp_path, HandoverMemory(1, 1 << 24), state_interval=32)
    token = ask(first, 1)
    assert [*token, *ask(second, 8, token)] == expected
    assert second.stats.prompt_tokens == 4
    assert second.stats.handover.missed_tokens == 0
    close(drivers)
