"""Blocks that were evicted to files: the tokens are the same when they come back, also in a new engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.core import EngineCore
from support.draft_heads import Eagle3Reference, make_eagle3
from support.engine import Driver as Core
from support.models import load_reference, make_model, reference_tokens
from support.runner import prompt
from unit.engines.openvino.watched_head import Watch, check_guesses, guess_always

PROMPT = prompt(100, 1)
OTHERS = [prompt(100, seed) for seed in range(2, 5)]


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("windows"), "mistral", sliding_window=40)


@pytest.fixture
def cores(make_runner: Any, tmp_path: Path) -> Iterator[Any]:
    """Makes engines with an empty cache of ten blocks over the same files."""
    made: list[EngineCore] = []

    def make(model: Path, scheduler: dict[str, Any] | None = None, **runner: Any) -> Core:
        for core in made:
            assert core.blocks is not None
            core.blocks.close(save=True)
        made.clear()
        driver = Core(
            make_runner(model, num_blocks=10, **runner), kv_offload_dir=str(tmp_path / "kv"), **scheduler or {}
        )
        assert isinstance(driver.core, EngineCore)
        made.append(driver.core)
        return driver

    yield make
    for core in made:
        assert core.blocks is not None
        core.blocks.close(save=False)


def ask(core: Core, tokens: list[int], count: int = 8, **params: Any) -> tuple[list[int], int]:
    [request] = core.add(tokens, count, **params)
    core.run()
    core.core.blocks._writer.submit(bool).result(60)  # type: ignore[union-attr]
    core.step()  # what was evicted is written, and this step takes it in
    return core.tokens[request], core.cached[request]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_are_the_same(family: str, llama_dir: Path, mistral_dir: Path, cores: Any) -> None:
    model = llama_dir if family == "llama" else mistral_dir
    expected = reference_tokens(load_reference(model), PROMPT, 8)
    core = cores(model)
    assert ask(core, PROMPT) == (expected, 0)
    for other in OTHERS:
        ask(core, other)
    assert ask(core, PROMPT) == (expected, 96)
    assert core.stats.offload.loaded
    core = cores(model)
    assert ask(core, PROMPT) == (expected, 96)
    assert core.stats.offload.damaged == 0


@pytest.mark.parametrize("kind", ["u8", "u4"])
def test_quantized_blocks_are_the_same(kind: str, llama_dir: Path, cores: Any) -> None:
    """In a new engine as in the one that has computed them: a prompt that is computed whole rounds otherwise."""
    core = cores(llama_dir, kv_cache_dtype=kind)
    ask(core, PROMPT)
    in_memory = ask(core, PROMPT)
    assert in_memory[1] == 96
    assert ask(cores(llama_dir, kv_cache_dtype=kind), PROMPT) == in_memory
    assert ask(cores(llama_dir), PROMPT)[1] == 0, "blocks of another type are not used"


def test_a_draft_model_computes_what_the_files_do_not_have(llama_dir: Path, cores: Any) -> None:
    speculative = {"speculative": "draft_model", "steps_in_flight": 1}
    core = cores(llama_dir, speculative, draft_model_dir=llama_dir)
    core.core.runner._draft_model._clock = lambda: 0.0
    expected, _ = ask(core, PROMPT, 40)
    for other in OTHERS:
        ask(core, other, 40)
    guessed, right = core.stats.draft_tokens, core.stats.accepted_tokens
    assert ask(core, PROMPT, 40) == (expected, 96)
    guessed, right = core.stats.draft_tokens - guessed, core.stats.accepted_tokens - right
    assert guessed == right > 20, "the model itself guesses right, if it has the whole prompt"


def test_other_weights_have_other_blocks(llama_dir: Path, cores: Any, tmp_path: Path) -> None:
    ask(cores(llama_dir), PROMPT)
    other = shutil.copytree(llama_dir, tmp_path / "other")
    assert ask(cores(other), PROMPT)[1] == 96, "it is not the folder that counts"
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-4] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert ask(cores(other), PROMPT)[1] == 0


def test_a_draft_head_has_its_features_again(cores: Any, tmp_path: Path) -> None:
    """Those of another head are not used."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=8)
    head, other = (make_eagle3(tmp_path / str(seed), draft_vocab_size=384, seed=seed) for seed in (1, 2))
    ask(cores(model, draft_model_dir=head), PROMPT)
    core = cores(model, {"speculative": "draft_model"}, draft_model_dir=head)
    watch = Watch(core.core.runner)
    guess_always(core)
    assert ask(core, PROMPT)[1] == 96
    assert watch.asked
    check_guesses(watch, Eagle3Reference(head, load_reference(model), (2, 4, 5)))
    assert ask(cores(model, draft_model_dir=other), PROMPT)[1] == 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_states_come_back_with_their_blocks(family: str, cores: Any, tmp_path: Path) -> None:
    """From files to the engine that has evicted them, and to new ones, also with another interval: up to the last
    checkpoint."""
    model = make_model(tmp_path / "model", family)
    expected = reference_tokens(load_reference(model), PROMPT, 8)
    core = cores(model, state_interval=64, max_num_seqs=1)
    assert ask(core, PROMPT) == (expected, 0)
    for other in OTHERS:
        ask(core, other)
    assert ask(core, PROMPT) == (expected, 64)
    assert core.stats.offload.loaded
    core = cores(model, state_interval=64, max_num_seqs=1)
    assert ask(core, PROMPT) == (expected, 64)
    assert core.stats.offload.loaded
    assert core.stats.offload.damaged == 0
    core.core.check_integrity()  # type: ignore[union-attr]
    assert ask(cores(model, state_interval=32), PROMPT) == (expected, 64)
