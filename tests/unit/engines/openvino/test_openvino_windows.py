"""Layers with windows beside layers without: the tokens of transformers, and what lies behind a window is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import support.engine
from penstock.kvcache.table import KVGroup, blocks_of_request
from support.models import edit_config, load_reference, make_model, reference_answers, reference_tokens
from support.runner import Driver, prompt

COUNT = 40
"""Tokens after a prompt: beyond a border of blocks."""
LENGTHS = (1, 32, 45, 230)
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 2e4}
ALTERNATING = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 32},
        {"sliding_window": 45},
        {"sliding_window": 64, "layer_types": ALTERNATING},
        {"sliding_window": 2, "layer_types": ALTERNATING},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
        {"layer_types": ["sliding_attention"] * 6},
        {"query_pre_attn_scalar": 100, "num_key_value_heads": 1, "attention_bias": True, "hidden_size": 48},
        {"tie_word_embeddings": False},
    ],
)
def test_gemma3_says_the_same_as_the_reference_whatever_its_windows(
    settings: dict[str, Any], tmp_path: Path, make_runner: Any
) -> None:
    make_model(tmp_path, "gemma3", **settings)
    prompts = [prompt(length, length) for length in LENGTHS]
    reference = load_reference(tmp_path)
    runner = make_runner(tmp_path, num_blocks=256)
    found = Driver(runner).generate(prompts, COUNT)
    wanted = reference_answers(reference, prompts, COUNT, found)
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the model says the same whatever the prompt"
    assert found == wanted
    # Blocks are given back and go to others meanwhile; steps end anywhere in a prompt.
    for budget in (13, 512):
        driver = support.engine.Driver(runner, max_num_seqs=6, max_num_batched_tokens=budget)
        ids = [driver.add(tokens, COUNT)[0] for tokens in prompts]
        driver.run()
        assert [driver.tokens[i] for i in ids] == wanted


def test_settings_of_older_checkpoints(tmp_path: Path, make_runner: Any) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    rope = {"full_attention": {**scaling, "rope_theta": 5e5}, "sliding_attention": LOCAL}
    make_model(tmp_path, "gemma3", rope_parameters=rope, layer_types=ALTERNATING)
    wanted = reference_tokens(load_reference(tmp_path), prompt(100, 1), COUNT)
    edit_config(
        tmp_path,
        layer_types=None,
        sliding_window_pattern=2,
        rope_parameters=None,
        rope_scaling=scaling,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        tie_word_embeddings=None,
    )
    assert Driver(make_runner(tmp_path)).generate([prompt(100, 1)], COUNT) == [wanted]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "qwen2-sliding"])
@pytest.mark.parametrize("shared", [64, 96, 190])
def test_prefix_hits_beyond_a_window(family: str, shared: int, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, family)
    reference = load_reference(tmp_path)
    driver = support.engine.Driver(make_runner(tmp_path, num_blocks=256), max_num_seqs=4)
    for seed in (1, 2):
        tokens = [*prompt(shared, 9), *prompt(40, seed)]
        [request] = driver.add(tokens, 20)
        driver.run()
        assert driver.tokens[request] == reference_tokens(reference, tokens, 20, guess=driver.tokens[request])
    assert driver.stats.prefix_hits == shared // 32 * 32


def test_layers_with_heads_of_two_sizes(tmp_path: Path, make_runner: Any) -> None:
    """Two layers with windows take the room of one without, in the same memory; in 8 bits values do not fill it to the
    byte, and have memory of their own. Blocks are copied, given back, and go to layers of the other size."""
    make_model(tmp_path, "gemma4", num_hidden_layers=8, layer_types=ALTERNATING + ALTERNATING[:2], eos_token_id=None)
    for kv, pieces in ("u8", 6), ("f32", 4):  # keys and values of two slots
        runner = make_runner(tmp_path, num_blocks=40, kv_cache_dtype=kv)
        assert [group.window for group in runner.info.kv_groups] == [24, 0, 0]
        cache = runner._model.cache
        assert len(cache._raw) == pieces
        assert sum(raw.nbytes for raw in cache._raw) == runner._decoders[0].block_bytes * 40
    driver = support.engine.Driver(runner, max_num_seqs=3, max_num_batched_tokens=40)
    prompts = [prompt(length, length) for length in (100, 100, 45, 70)]
    ids = [driver.add(tokens, COUNT)[0] for tokens in prompts]
    driver.run()
    assert driver.stats.prefix_hits
    found = [driver.tokens[i] for i in ids]
    assert found == reference_answers(load_reference(tmp_path), prompts, COUNT, found)


def test_samples_of_one_prompt_part_behind_a_window(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "gemma3")
    driver = support.engine.Driver(make_runner(tmp_path, num_blocks=256), max_num_seqs=4)
    tokens = prompt(75, 3)
    several = driver.add(tokens, 40, n=3, temperature=1.0, seed=5)
    driver.run()
    alone = [driver.add(tokens, 40, temperature=1.0, seed=5 + n)[0] for n in range(3)]
    driver.run()
    assert [driver.tokens[i] for i in several] == [driver.tokens[i] for i in alone]


def test_five_of_six_layers_with_windows_hold_a_third(tmp_path: Path, make_runner: Any) -> None:
    """Windows of 256 and a prompt of 4k, computed 256 tokens at a time."""
    length, chunk = 4096, 256
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_model(
        tmp_path, "gemma3", num_hidden_layers=12, sliding_window=chunk, max_position_embeddings=2 * length, **shape
    )
    runner = make_runner(tmp_path, num_blocks=300, max_num_batched_tokens=chunk)
    groups = runner.info.kv_groups
    assert sorted(groups, key=lambda group: group.window) == [KVGroup(32), *[KVGroup(32, chunk)] * 5]
    everything = blocks_of_request([KVGroup(32)] * len(groups), length, chunk)
    assert blocks_of_request(groups, length, chunk) <= 0.28 * everything
    driver = support.engine.Driver(runner, max_num_seqs=4, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    tokens = prompt(length - 32, 1)
    [request] = driver.add(tokens, 32)
    held = []
    while request not in driver.ends:
        driver.step()
        held.append(driver.stats.num_blocks - driver.stats.num_free_blocks)
    assert max(held) <= 0.28 * everything
    assert held[-2] <= 0.23 * everything
    reference = load_reference(tmp_path, attention="sdpa")
    assert driver.tokens[request] == reference_tokens(reference, tokens, 32, guess=driver.tokens[request])
