"""Models with recurrent layers: greedy tokens are those of transformers, whatever the steps are like."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, GroupTables, StepBatch
from penstock.engines.torch import loading
from penstock.engines.torch.attention import ATTENTION, register
from penstock.engines.torch.probe import inspect_layers
from penstock.engines.torch.recurrent import plan_pieces
from penstock.gateway.models.memory.state_shape import StateShape, read_states
from support.engine import Driver
from support.guesses import guessed
from support.models import load_reference, reference_answers, reference_tokens
from unit.engines.torch.families import SHAPE, make_family

PROMPTS = [[3 + (7 * j + 13 * i) % 290 for j in range(30 + 17 * i)] for i in range(3)]
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 16, "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 16,
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "time_step_min": 0.05,
    },
    "qwen3_5_text": _DELTA,
}


def make_hybrid(folder: Path, family: str) -> PreTrainedModel:
    """Saves a model; returns transformers' own."""
    make_family(folder, family, **_SMALL, **FAMILIES[family])
    reference = load_reference(folder)
    for module in reference.modules():
        if hasattr(module, "time_step_limit"):  # applied to chunks and not to single tokens
            module.time_step_limit = (0.0, math.inf)
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, make_runner: Any) -> None:
    """In chunks, beside others, and behind a prefix that ends at a checkpoint."""
    reference = make_hybrid(tmp_path, family)
    runner = make_runner(tmp_path, block_size=16, state_interval=16)
    for budget in (3, 256):
        driver = Driver(runner, max_num_seqs=3, max_num_batched_tokens=budget, enable_prefix_caching=True)
        ids = [driver.add(prompt, 12)[0] for prompt in PROMPTS]
        driver.run()
        answers = [driver.tokens[i] for i in ids]
        assert answers == reference_answers(reference, PROMPTS, 12, answers)
        assert len({token for tokens in answers for token in tokens}) > 5
    tokens, stats = guessed(runner, PROMPTS, "off", [[*tokens[:3], 7, *tokens[4:]] for tokens in answers], 12)
    assert tokens == answers
    assert 5 < stats.accepted_tokens < stats.draft_tokens
    [request] = driver.add([*PROMPTS[1], 5, 6], 6)
    driver.run()
    assert driver.stats.prefix_hits == 32
    assert driver.tokens[request] == reference_tokens(reference, [*PROMPTS[1], 5, 6], 6, guess=driver.tokens[request])
    check_sizes(reference)


def check_sizes(model: PreTrainedModel) -> None:
    """The gateway reads out of config.json how large states are."""
    register()
    model.set_attn_implementation(ATTENTION)
    layers, _ = inspect_layers(model, 256)
    sizes = {"conv_states": 0, "recurrent_states": 0}
    for states in layers.states.values():
        for layout in states:
            sizes[layout.kind] += math.prod(layout.shape)
    expected = StateShape(len(layers.attention), sizes["conv_states"], sizes["recurrent_states"])
    assert read_states(model.config.to_dict()) == expected


def test_preempted_requests_go_on_from_a_checkpoint(tmp_path: Path, make_runner: Any) -> None:
    reference = make_hybrid(tmp_path, "qwen3_5_text")
    runner = make_runner(tmp_path, block_size=16, num_blocks=11, state_interval=32)
    driver = Driver(runner, max_num_seqs=3, max_num_batched_tokens=64, enable_prefix_caching=True)
    ids = [driver.add(prompt, 30)[0] for prompt in PROMPTS]
    driver.run()
    assert driver.stats.preemptions > 0
    answers = [driver.tokens[i] for i in ids]
    assert answers == reference_answers(reference, PROMPTS, 30, answers)


def test_the_text_model_of_a_larger_one(tmp_path: Path, make_runner: Any) -> None:
    """Qwen3.5 as it is published: what reads images is left out."""
    text = {**SHAPE, **_SMALL, **_DELTA}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"patch_size": 4})
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(tmp_path)
    driver = Driver(make_runner(tmp_path), max_num_seqs=1)
    [request] = driver.add(PROMPTS[0], 4)
    driver.run()
    assert driver.tokens[request] == reference_tokens(model, PROMPTS[0], 4)


def test_half_precision(tmp_path: Path, make_runner: Any) -> None:
    make_hybrid(tmp_path, "lfm2")
    driver = Driver(make_runner(tmp_path, dtype="bf16"), max_num_seqs=1)
    [request] = driver.add(PROMPTS[0], 4)
    driver.run()
    assert len(driver.tokens[request]) == 4


def test_which_tokens_are_computed_together() -> None:
    """Chunks are cut at checkpoints; requests with equally many tokens go together, first tokens by themselves."""
    computed, scheduled = np.array([0, 6, 4, 3]), np.array([5, 1, 1, 2])
    tables = np.array([[10, 11], [20, 21], [30, 31], [40, 41]], np.int32)
    batch = StepBatch(
        NO_TOKENS,
        NO_INTS,
        np.array([0, 5, 6, 7, 9]),
        computed,
        scheduled,
        (GroupTables(tables, np.zeros(4, np.int64), np.full(4, 2)),),
        NO_INTS,
        adapter_slots=NO_INTS,
        wants_hidden=False,
    )
    pieces = list(plan_pieces(batch, np.arange(9), 4, torch.device("cpu")))
    assert [
        (piece.tokens.tolist(), None if piece.reads is None else piece.reads.tolist(), piece.writes.tolist())
        for piece in pieces
    ] == [
        ([[5], [6], [7]], [21, 30, 40], [21, 31, 40]),
        ([[0, 1, 2, 3]], None, [10]),
        ([[4], [8]], [10, 40], [11, 41]),
    ]


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "jamba",
            {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "use_mamba_kernels": False},
            "JambaForCausalLM cannot be run: in steps it computes something else",
        ),
        ("recurrent_gemma", {}, "RecurrentGemmaForCausalLM keeps state outside the KV cache"),
        (
            "lfm3",
            {"layer_types": ["conv", "sliding_attention"] * 2, "sliding_window": 24},
            "sliding windows beside recurrent layers",
        ),
    ],
)
def test_hybrids_that_it_refuses(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path, make_runner: Any
) -> None:
    make_family(tmp_path, family, **_SMALL, **overrides)
    with pytest.raises(UnsupportedError, match=message):
        make_runner(tmp_path)


def test_what_else_it_refuses(tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hybrid(tmp_path, "lfm2")
    with pytest.raises(InvalidRequestError, match="state_interval=33 is not a multiple"):
        make_runner(tmp_path, state_interval=33)
    monkeypatch.setattr(loading.transformers, "__version__", "5.20.1")
    with pytest.raises(UnsupportedError, match=r"5\.20\.1 is too old: for recurrent layers at least 5\.24 is needed"):
        make_runner(tmp_path)
