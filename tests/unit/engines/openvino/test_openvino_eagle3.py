"""EAGLE-3 heads: guesses are those of the published forward, and tokens those of the model without a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.engines.errors import UnsupportedError
from support.draft_heads import (
    Eagle3Reference,
    make_agreeing_eagle3,
    make_eagle3,
    make_near_identity,
    save_head,
)
from support.engine import Driver as Core
from support.models import VOCAB_SIZE, edit_config, load_reference, make_model
from support.runner import prompt
from unit.engines.openvino.watched_head import Watch, check_guesses, guess_always, run

LAYERS = 8


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 4, 5)),
        (
            {
                "norm_before_residual": True,
                "embeddings": False,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
            },
            (1, 4, 7),
        ),
        ({"draft_vocab_size": 2}, (2, 4, 5)),
    ],
)
def test_guesses_are_those_of_the_published_forward(
    changes: dict[str, Any], layers: tuple[int, ...], target_dir: Path, tmp_path: Path, make_runner: Any
) -> None:
    """Also behind prompts in parts, prefix hits, copied blocks, and guesses that were right: of two tokens, where both
    the head and the requests have no others."""
    head_dir = make_eagle3(tmp_path, **changes)
    runner = make_runner(target_dir, draft_model_dir=head_dir, num_blocks=9)
    assert runner.info.runner.endswith(", EAGLE-3 head")
    watch = Watch(runner)
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    guess_always(core)
    d2t = load_file(head_dir / "model.safetensors")["d2t"].numpy()
    ids = (np.arange(len(d2t)) + d2t).tolist()
    allowed = ids if len(ids) == 2 else None
    for tokens, count, n in [(prompt(70, 1), 30, 1), (prompt(70, 1), 12, 1), (prompt(40, 2), 20, 2)]:
        core.add(tokens, count, n, temperature=1.0, seed=3, allowed_token_ids=allowed)
        core.run()
    assert bool(core.stats.accepted_tokens) == bool(allowed)
    reference = Eagle3Reference(head_dir, load_reference(target_dir), layers)
    assert len(watch.asked) > 20
    assert max(len(guesses) for _, guesses, _ in watch.asked) == 3
    check_guesses(watch, reference, ids)


@pytest.mark.parametrize("agrees", [True, False])
def test_tokens_do_not_change(agrees: bool, target_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    if agrees:
        target_dir = make_near_identity(make_model(tmp_path / "target", "llama", num_hidden_layers=LAYERS))
        chosen = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:360].sort().values
        head_dir = make_agreeing_eagle3(tmp_path / "head", target_dir, chosen)
    else:
        head_dir = make_eagle3(tmp_path / "head")
    runner = make_runner(target_dir, draft_model_dir=head_dir, num_blocks=9, max_loras=1)
    wanted, plain = run(runner, "off", 1)
    for depth in (1, 2):
        tokens, stats = run(runner, "draft_model", depth)
        assert tokens == wanted
        assert stats.preemptions
        assert stats.draft_tokens
        if agrees:  # greedy guesses, half of which are for tokens that are sampled otherwise
            assert stats.accepted_tokens > 0.4 * stats.draft_tokens
            assert stats.steps < 0.8 * plain.steps


def test_features_have_a_part_of_the_memory(target_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    """A token has keys and values of 32 numbers each in 8 layers, and with a head in one more, beside 64 features."""
    head_dir = make_eagle3(tmp_path)
    alone = make_runner(target_dir, num_blocks=None, kv_cache_memory=8 << 20)
    beside = make_runner(target_dir, num_blocks=None, kv_cache_memory=8 << 20, draft_model_dir=head_dir)
    assert beside.info.num_blocks == alone.info.num_blocks * 512 // (512 + 64 + 64)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_it_drafts_beside_quantized_weights(weights: str, target_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    head_dir = make_eagle3(tmp_path, embeddings=False)
    runner = make_runner(target_dir, draft_model_dir=head_dir, weights=weights, weights_cache=0)
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    core.add(prompt(40, 1), 8)
    core.run()
    assert core.stats.draft_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": VOCAB_SIZE + 2}, "its vocabulary has 386 tokens, the model's 384"),
        ({"target_hidden_size": 32}, "it is for hidden states of size 32, the model's have 64"),
        ({"draft_vocab_size": 400}, "draft_vocab_size=400 is not from 1 to 384"),
        ({"transformer_layer_config": {}}, "EAGLE-3 heads in the layout of the speculators library"),
        ({"num_hidden_layers": 2}, "only single-layer EAGLE-3 heads are supported, not 2 layers"),
        ({"sliding_window": 512}, "EAGLE-3 heads with a sliding window are not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-3 heads that get the last hidden state alone"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, r"eagle_aux_hidden_state_layer_ids=\[1, 3"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 3, 2]}, r"eagle_aux_hidden_state_layer_ids=\[4, 3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"tensor fc.weight has shape \(64, 192\)"),
        ({"hidden_size": 128, "embeddings": False}, "no model.embed_tokens.weight, and its hidden size of 128 is not"),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE type 'dynamic' is not supported"),
    ],
)
def test_one_that_does_not_fit(
    changes: dict[str, Any], message: str, target_dir: Path, tmp_path: Path, make_runner: Any
) -> None:
    head_dir = make_eagle3(tmp_path)
    if changes.pop("embeddings", True):
        edit_config(head_dir, **changes)
    else:
        head_dir = make_eagle3(tmp_path, embeddings=False, **changes)
    with pytest.raises(UnsupportedError, match=f"^speculative-model: .*{message}"):
        make_runner(target_dir, draft_model_dir=head_dir)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", None, "the checkpoint has no tensor d2t"),
        ("d2t", torch.zeros(299, dtype=torch.int64), "a number for each of the 300 tokens"),
        ("d2t", torch.full((300,), 100), "leads to tokens that the vocabulary does not have"),
        ("fc.bias", torch.zeros(64), "1 tensors that no part of the model uses: fc.bias"),
        ("lm_head.weight", torch.zeros(300, 60), "tensor lm_head.weight has shape"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, tensor: torch.Tensor | None, message: str, target_dir: Path, tmp_path: Path, make_runner: Any
) -> None:
    head_dir = make_eagle3(tmp_path)
    tensors = load_file(head_dir / "model.safetensors") | {name: tensor}
    save_head(
        head_dir,
        json.loads((head_dir / "config.json").read_text()),
        {n: t for n, t in tensors.items() if t is not None},
    )
    with pytest.raises(UnsupportedError, match=f"^speculative-model: .*{message}"):
        make_runner(target_dir, draft_model_dir=head_dir)


def test_models_that_get_none(llama_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    head_dir = make_eagle3(tmp_path / "head")
    with pytest.raises(UnsupportedError, match="speculative-model: the model has layers with sliding windows"):
        make_runner(make_model(tmp_path / "model", "mistral"), draft_model_dir=head_dir)
    with pytest.raises(UnsupportedError, match=r"speculative-model: .* the model has fewer than 7 layers"):
        make_runner(llama_dir, draft_model_dir=head_dir)
