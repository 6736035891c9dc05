"""Layers for multi-token prediction in a model's own checkpoint, which guess if they are asked to: MiMo's, whose model
has Qwen2's layers, and those of Qwen3.5 and Qwen3-Next, whose models have recurrent layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.engines.errors import UnsupportedError
from support.draft_heads import MtpReference, QwenMtpReference, make_mimo, make_qwen_mtp
from support.engine import Driver as Core
from support.models import edit_config, load_reference, make_model, reference_tokens
from support.qwen_images import make_qwen, picture, reference_tokens_with_pictures, with_pictures
from support.runner import prompt
from unit.engines.openvino.watched_head import Watch, check_guesses, guess_always, run


@pytest.fixture(scope="module")
def mimo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("mimo"))


def _make(family: str, folder: Path, agrees: bool = False) -> Path:
    return make_mimo(folder, agrees) if family == "mimo" else make_qwen_mtp(folder, family, agrees)


@pytest.mark.families("mimo", "qwen3.5-moe")
@pytest.mark.parametrize("family", ["mimo", "qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_the_model_and_its_guesses(family: str, tmp_path: Path, make_runner: Any) -> None:
    """Tokens are those of transformers, and guesses those of the published forward."""
    runner = make_runner(_make(family, tmp_path), mtp=True, num_blocks=9)
    assert runner.info.runner.endswith(", MTP head")
    watch = Watch(runner)
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    guess_always(core)
    [request] = core.add(prompt(70, 1), 20)
    core.run()
    core.add(prompt(70, 1), 12, 2, temperature=1.0, seed=3)
    core.run()
    reference = load_reference(tmp_path)
    assert core.tokens[request] == reference_tokens(reference, prompt(70, 1), 20)
    assert len(watch.asked) > 20
    check_guesses(watch, (MtpReference if family == "mimo" else QwenMtpReference)(tmp_path, reference))


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("family", ["mimo", "qwen3.5"])
def test_tokens_do_not_change(family: str, agrees: bool, tmp_path: Path, make_runner: Any) -> None:
    runner = make_runner(_make(family, tmp_path, agrees), mtp=True, num_blocks=9)
    wanted, plain = run(runner, "off", 1)
    tokens, stats = run(runner, "draft_model", 2)
    assert tokens == wanted
    assert stats.preemptions
    assert stats.draft_tokens
    if agrees:  # greedy guesses, half of which are for tokens that are sampled otherwise
        assert stats.accepted_tokens > 0.4 * stats.draft_tokens
        assert stats.steps < 0.8 * plain.steps


def test_a_head_that_knows_the_answer(tmp_path: Path, make_runner: Any) -> None:
    """All of its guesses are right, also those across checkpoints of recurrent states."""
    runner = make_runner(make_qwen_mtp(tmp_path, agrees=True), mtp=True)
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    guess_always(core)
    core.add(prompt(30, 1), 40)
    core.run()
    assert core.stats.accepted_tokens == core.stats.draft_tokens > 20


def test_the_head_is_left_out_where_it_is_not_asked_for(mimo_dir: Path, make_runner: Any) -> None:
    """Three layers keep 64 numbers of a token each; with the head there is one layer more, and 64 features."""
    alone = make_runner(mimo_dir, num_blocks=None, kv_cache_memory=8 << 20)
    assert not alone.info.has_draft_model
    assert alone.info.runner.endswith("1 threads")
    beside = make_runner(mimo_dir, num_blocks=None, kv_cache_memory=8 << 20, mtp=True)
    assert beside.info.num_blocks == alone.info.num_blocks * 192 // (192 + 64 + 64)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_it_drafts_with_quantized_weights(weights: str, mimo_dir: Path, make_runner: Any) -> None:
    runner = make_runner(mimo_dir, mtp=True, weights=weights, weights_cache=0)
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    core.add(prompt(40, 1), 8)
    core.run()
    assert core.stats.draft_tokens


def test_a_model_that_also_reads_images(tmp_path: Path, make_runner: Any) -> None:
    """As Qwen3.5 is published: text gets guesses, and pictures get none of the head."""
    model = make_qwen(tmp_path, "qwen3.5")
    head = load_file(make_qwen_mtp(tmp_path / "text") / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensor for name, tensor in head.items() if name.startswith("mtp.")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    pixels = picture(1)
    seen, images = with_pictures([7, 8], pixels)
    core = Core(make_runner(tmp_path, mtp=True), max_num_seqs=8, max_num_batched_tokens=48, speculative="draft_model")
    guess_always(core)
    [looking] = core.add(seen, 12, images=images)
    core.run()
    assert core.tokens[looking] == reference_tokens_with_pictures(model, "qwen3.5", seen, [pixels], 12)
    assert not core.stats.draft_tokens
    [reading] = core.add(prompt(40, 1), 12)
    core.run()
    assert core.tokens[reading] == reference_tokens(model, prompt(40, 1), 12)
    assert core.stats.draft_tokens


def test_models_without_one(llama_dir: Path, mimo_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(UnsupportedError, match="speculative=mtp: no head of LlamaForCausalLM is supported; those of"):
        make_runner(llama_dir, mtp=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((mimo_dir / name).read_bytes())
    edit_config(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(UnsupportedError, match=r"speculative=mtp: config\.json has num_nextn_predict_layers=2; one"):
        make_runner(tmp_path, mtp=True)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    tensors = load_file(mimo_dir / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "input_proj" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"no tensor model\.mtp_layers\.0\.input_proj\.weight: it was saved"):
        make_runner(tmp_path, mtp=True)
    qwen = make_model(tmp_path / "qwen", "qwen3.5")
    with pytest.raises(UnsupportedError, match=r"speculative=mtp: the checkpoint has no tensor mtp\.fc\.weight: it"):
        make_runner(qwen, mtp=True)
    edit_config(qwen, mtp_num_hidden_layers=2)
    with pytest.raises(UnsupportedError, match=r"config\.json has mtp_num_hidden_layers=2; one layer is supported"):
        make_runner(qwen, mtp=True)
