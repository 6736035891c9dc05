"""Each family generates, in f32, the very tokens that transformers generates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_models import FAMILIES, VOCAB_SIZE, edit_config, load_reference, make_model, reference_tokens
from helpers_runner import Driver

PROMPT_LENGTHS = (1, 7, 33, 70)
COUNT = 40


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]


def assert_same_tokens(model_dir: Path, make_runner: Any, **settings: Any) -> None:
    reference = load_reference(model_dir)
    wanted = [reference_tokens(reference, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the model says the same whatever the prompt"
    assert Driver(make_runner(model_dir, **settings)).generate(prompts(), COUNT) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path, make_runner: Any) -> None:
    assert_same_tokens(make_model(tmp_path, family), make_runner)


def test_sharded_checkpoint(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", shards=3)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_tokens(tmp_path, make_runner)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_exact_in_f32(dtype: torch.dtype, tmp_path: Path, make_runner: Any) -> None:
    assert_same_tokens(make_model(tmp_path, "qwen2", dtype=dtype), make_runner)


def test_old_style_rope_settings(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama-llama3")
    reference = load_reference(tmp_path)
    wanted = [reference_tokens(reference, prompt, COUNT) for prompt in prompts()]
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    edit_config(tmp_path, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert Driver(make_runner(tmp_path)).generate(prompts(), COUNT) == wanted


def test_untied_qwen2_without_sliding_window(tmp_path: Path, make_runner: Any) -> None:
    assert_same_tokens(make_model(tmp_path, "qwen2", tie_word_embeddings=False, sliding_window=8), make_runner)
