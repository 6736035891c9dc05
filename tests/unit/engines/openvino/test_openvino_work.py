"""What a step reads and computes, by the model's own count, for shapes that are counted by hand here."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.openvino.work import product_speeds
from support.cpu import ROUNDED, needs_int8, own_cache
from support.models import make_model
from unit.engines.openvino.conftest import MakeRunner

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 128, 256, 2, 4, 2, 32
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
}
MATRICES = {
    "q_proj": (HEADS * HEAD, HIDDEN),
    "k_proj": (KV_HEADS * HEAD, HIDDEN),
    "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}
WEIGHTS = LAYERS * sum(rows * width for rows, width in MATRICES.values())
ROWS = LAYERS * sum(rows for rows, _ in MATRICES.values())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))


def counted(make_runner: MakeRunner, folder: Path, **settings: object) -> tuple[ModelWork, int]:
    """And the size of the vocabulary."""
    info = make_runner(folder, **settings).info
    assert info.work is not None
    return info.work, info.vocab_size


@pytest.mark.parametrize("tied", [True, False])
def test_each_matrix_counts_once_and_an_embedding_only_as_the_head(
    make_runner: MakeRunner, tmp_path: Path, tied: bool
) -> None:
    work, vocab = counted(make_runner, make_model(tmp_path / "m", "llama", tie_word_embeddings=tied, **SHAPE))
    assert work.token_flops == 2 * WEIGHTS
    assert work.logits_flops == 2 * vocab * HIDDEN
    assert work.weight_bytes == 4 * (WEIGHTS + vocab * HIDDEN)
    assert (work.weights, work.activations, work.precision) == ("f32", "f32", "f32")


def test_int8_has_a_byte_for_each_weight_and_a_scale_for_each_row(make_runner: MakeRunner, tmp_path: Path) -> None:
    work, vocab = counted(make_runner, make_model(tmp_path / "m", "llama", **SHAPE), weights="int8")
    assert work.weight_bytes == WEIGHTS + vocab * HIDDEN + 4 * (ROWS + vocab)
    assert work.token_flops == 2 * WEIGHTS
    assert (work.weights, work.activations, work.precision) == ("int8", ROUNDED, "f32")


@pytest.mark.parametrize(("activations", "zero_bytes"), [("f32", 4), pytest.param("int8", 0.5, marks=needs_int8)])
def test_int4_has_half_a_byte_and_for_each_group_a_scale_and_a_zero_point(
    make_runner: MakeRunner, tmp_path: Path, activations: str, zero_bytes: float
) -> None:
    """Which is a share in f32 where it is apart."""
    model = make_model(tmp_path / "m", "llama", **SHAPE)
    work, vocab = counted(make_runner, model, weights="int4", activations=activations)
    # of the two layers, the last one's values and down_proj stay in 8 bits
    kept = [MATRICES["v_proj"], MATRICES["down_proj"]]
    in_8 = sum(rows * width for rows, width in kept) + vocab * HIDDEN
    in_4 = WEIGHTS - sum(rows * width for rows, width in kept)
    rows_in_8 = sum(rows for rows, _ in kept) + vocab
    assert work.weight_bytes == in_8 + 4 * rows_in_8 + in_4 // 2 + in_4 // 128 * (2 + zero_bytes)


def test_keys_and_values_are_those_of_all_layers_of_a_group(make_runner: MakeRunner, tmp_path: Path) -> None:
    work, _ = counted(make_runner, make_model(tmp_path / "m", "llama", **SHAPE))
    assert work.kv_bytes == (LAYERS * 2 * KV_HEADS * HEAD * 4,)
    assert work.attention_flops == (LAYERS * 4 * HEADS * HEAD,)
    short, _ = counted(make_runner, make_model(tmp_path / "g", "gemma3"))
    assert len(short.kv_bytes) == len(short.attention_flops) > 1


def test_threads_by_tokens(make_runner: MakeRunner, llama_dir: Path) -> None:
    assert counted(make_runner, llama_dir, threads=1)[0].threads == ((0, 1),)


@pytest.mark.parametrize(("weights", "activations"), [("f32", "f32"), ("int8", ROUNDED), ("int4", ROUNDED)])
def test_products_of_each_type_can_be_timed(monkeypatch: pytest.MonkeyPatch, weights: str, activations: str) -> None:
    monkeypatch.setattr("penstock.engines.openvino.work._ROWS", 2)
    monkeypatch.setattr("penstock.engines.openvino.work._SIZE", 128)
    work = ModelWork(
        weight_bytes=0,
        token_flops=0,
        logits_flops=0,
        kv_bytes=(),
        attention_flops=(),
        weights=weights,
        activations=activations,
        precision="f32",
        threads=(),
    )
    ticks = iter(range(100))
    speeds = product_speeds(work, 1, 3, clock=lambda: float(next(ticks)))
    assert speeds == [2 * 2 * 128 * 128 * 4] * 3


def test_experts_are_not_counted(make_runner: MakeRunner, tmp_path: Path) -> None:
    """Each token reads others."""
    assert make_runner(make_model(tmp_path / "m", "qwen3-moe")).info.work is None
