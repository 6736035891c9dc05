"""A draft model beside the model: the same tokens with fewer steps, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import UnsupportedError
from support.models import VOCAB_SIZE, make_model
from unit.engines.openvino.watched_head import run


@pytest.fixture(scope="module")
def weaker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("weaker"), "llama", num_hidden_layers=1)


@pytest.mark.parametrize("same", [True, False])
def test_tokens_do_not_change(same: bool, llama_dir: Path, weaker_dir: Path, make_runner: Any) -> None:
    runner = make_runner(llama_dir, draft_model_dir=llama_dir if same else weaker_dir, num_blocks=9)
    assert f"draft model of {3 if same else 1} layers" in runner.info.runner
    wanted, plain = run(runner, "off", 1)
    for depth in (1, 2):
        tokens, stats = run(runner, "draft_model", depth)
        assert tokens == wanted
        assert stats.preemptions
        if same:  # greedy guesses of the model itself, some of which are sampled otherwise
            assert stats.draft_tokens > stats.accepted_tokens > 0.6 * stats.draft_tokens
            assert stats.steps < 0.75 * plain.steps
        assert stats.draft_tokens


@pytest.mark.parametrize("kind", ["f32", "u4"])
def test_its_cache_has_a_part_of_the_memory(kind: str, llama_dir: Path, make_runner: Any) -> None:
    settings = {"num_blocks": None, "kv_cache_memory": 8 << 20, "kv_cache_dtype": kind, "max_num_seqs": 256}
    alone = make_runner(llama_dir, **settings)
    beside = make_runner(llama_dir, **settings, draft_model_dir=llama_dir)
    assert beside.info.num_blocks == alone.info.num_blocks // 2


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {"vocab_size": VOCAB_SIZE + 2}, "its vocabulary has 386 tokens, the model's 384"),
        ("mistral", {}, "the draft model has layers with sliding windows"),
    ],
)
def test_one_that_does_not_fit(
    family: str, config: dict[str, Any], message: str, llama_dir: Path, tmp_path: Path, make_runner: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"^speculative-model: {message}"):
        make_runner(llama_dir, draft_model_dir=make_model(tmp_path, family, **config))


def test_a_model_with_windows_gets_no_draft_model(llama_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(UnsupportedError, match="speculative-model: the model has layers with sliding windows"):
        make_runner(make_model(tmp_path, "mistral"), draft_model_dir=llama_dir)


def test_one_that_is_broken(llama_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    (tmp_path / "config.json").write_text((llama_dir / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=r"^speculative-model: no model\.safetensors"):
        make_runner(llama_dir, draft_model_dir=tmp_path)
