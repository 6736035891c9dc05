"""Weights in 4 bits: what they stand for, what they are close to, and the file that they are kept in."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import InvalidRequestError
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.quantization import (
    GROUP,
    keeps_8_bits,
    packed_halves,
    quantize_groups,
    quantize_rows,
    with_zeros_apart,
)
from penstock.engines.openvino.trials import settle
from penstock.engines.openvino.weights import Weights
from penstock.gateway.models.language.models import unpack
from support.cpu import own_cache
from support.gguf import write_gguf
from support.models import load_reference, make_model, reference_logprobs
from support.quantized import product_and_types
from support.runner import Driver, prompt

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
WIDE_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "nemotron-h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3", **WIDE)


def unpacked(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.float32]:
    both = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:count]
    return both.astype(np.float32)


def dequantized(path: Path, name: str) -> npt.NDArray[np.float32]:
    tensor = Checkpoint(path)[name]
    values, zeros, scales = quantize_groups(tensor)
    grouped = unpacked(values, scales.size * GROUP).reshape(*scales.shape[:2], GROUP)
    offset = unpacked(zeros, scales.size).reshape(scales.shape)
    return ((grouped - offset) * scales.astype(np.float32)).reshape(tensor.shape)


def test_no_weight_is_farther_off_than_its_group_s_step(tmp_path: Path) -> None:
    matrix = torch.randn(7, 3 * GROUP, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    matrix[3] = 0
    matrix[4] = matrix[4].abs() + 1  # all on one side: zero is still exact
    matrix[5, GROUP : 2 * GROUP] = 7.0
    save_file({"w": matrix}, tmp_path / "model.safetensors")
    found = dequantized(tmp_path, "w")
    wanted = matrix.numpy()
    assert np.isfinite(found).all()
    assert (found[3] == 0).all()
    groups = wanted.reshape(7, 3, GROUP)
    steps = (np.maximum(groups.max(2), 0) - np.minimum(groups.min(2), 0)) / 15
    error = np.abs(found - wanted).reshape(7, 3, GROUP).max(2)
    assert (error <= steps * 1.02 + 6e-8).all()
    assert error[5, 1] < 0.01


@pytest.mark.parametrize("groups", [1, 3])
def test_zero_points_in_a_product_of_their_own_change_no_weight(groups: int) -> None:
    """Exactly: float64 has room for the sum of both parts."""
    rows, size = 5, 8
    random = np.random.default_rng(0)
    levels = random.integers(0, 16, (rows, groups, size), np.uint8)
    zeros = random.permutation(np.resize([0, 8, 15, 3], rows * groups)).astype(np.uint8).reshape(rows, groups, 1)
    scales = random.uniform(1e-7, 60_000, (rows, groups, 1)).astype(np.float16)
    wanted = (levels - zeros.astype(np.float64)) * scales
    values, same, shares = with_zeros_apart([packed_halves(levels), packed_halves(zeros), scales])
    signed = unpacked(values, levels.size).reshape(levels.shape)
    signed = np.where(signed > 7, signed - 16, signed)  # two's complement
    assert shares.dtype == np.float32
    np.testing.assert_array_equal(signed * same.astype(np.float64) + shares.astype(np.float64)[:, :, None], wanted)
    symmetric = with_zeros_apart([packed_halves(levels), packed_halves(np.full_like(zeros, 8)), scales])
    assert len(symmetric) == 2, "all shares are zero"


@pytest.mark.parametrize(("out", "groups"), [(1, 1), (7, 3), (48, 2), (5, 20), (5, 21), (16, 37), (7, 65)])
def test_both_forms_of_4_bits_give_the_same_products(out: int, groups: int, tmp_path: Path) -> None:
    """But for the rounding of f32; of one row and of several, for which the plugin has other kernels. Those of
    21 and 37 groups are in parts."""
    width = groups * GROUP
    matrix = torch.randn(out, width, generator=torch.Generator().manual_seed(0))
    matrix[0, :GROUP] = matrix[0, :GROUP].abs() + 1  # the zero point is 0
    matrix[-1, -GROUP:] = -matrix[-1, -GROUP:].abs() - 1  # and 15
    save_file({"w": matrix}, tmp_path / "model.safetensors")
    for count in (1, 9):
        x = np.random.default_rng(count).standard_normal((count, width), np.float32) + 1
        former, before = product_and_types(Weights(Checkpoint(tmp_path), "int4"), "w", (out, width), x)
        found, types = product_and_types(Weights(Checkpoint(tmp_path), "int4", unpacks=True), "w", (out, width), x)
        assert np.abs(found - former).max() < 2e-6 * width
        assert np.abs(found - x @ dequantized(tmp_path, "w").T).max() < 2e-6 * width
        assert ("u4" in before, "i4" in before) == (True, False)
        assert ("u4" in types, "i4" in types) == (False, True)


def test_experts_keep_their_zero_points(tmp_path: Path) -> None:
    """Many small products take longer with products of zero points beside them."""
    name = "model.layers.0.mlp.experts.11.up_proj.weight"
    save_file({name: torch.randn(8, GROUP)}, tmp_path / "model.safetensors")
    weights = Weights(Checkpoint(tmp_path), "int4", unpacks=True)
    _, types = product_and_types(weights, name, (8, GROUP), np.ones((1, GROUP), np.float32))
    assert ("u4" in types, "i4" in types) == (True, False)


def test_the_matrices_that_stay_in_8_bits() -> None:
    kept = [
        number
        for number in range(24)
        if keeps_8_bits(f"model.layers.{number}.mlp.down_proj.weight", 24)
        and keeps_8_bits(f"model.layers.{number}.self_attn.v_proj.weight", 24)
    ]
    assert kept == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert not keeps_8_bits("model.layers.0.mlp.up_proj.weight", 24)
    gates = ("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj")
    assert all(keeps_8_bits(f"model.layers.5.linear_attn.{name}.weight", 24) for name in gates)
    assert not keeps_8_bits("model.layers.0.linear_attn.in_proj_qkv.weight", 24)


def logprobs(runner: Any, tokens: list[int]) -> npt.NDArray[np.float64]:
    driver = Driver(runner)
    driver.add(1, tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    return np.array([entry.logprob for entry in driver.step().prompt_logprobs[1]])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen2-moe", "lfm2", "qwen3.5", "nemotron-h"])
def test_the_graph_computes_with_the_rounded_weights(family: str, tmp_path: Path, make_runner: Any) -> None:
    """With exact activations, against transformers with the same rounded weights."""
    model = make_model(tmp_path / "model", family, **WIDE, **WIDE_EXPERTS.get(family, {}))
    runner = make_runner(model, weights="int4", activations="f32")
    assert "weights int4, activations f32" in runner.info.runner
    tokens = prompt(120, 1)
    found = logprobs(runner, tokens)
    rounded = tmp_path / "rounded"
    shutil.copytree(model, rounded)
    weights = load_file(model / "model.safetensors")
    for name, values in weights.items():
        if name.endswith("gate.weight"):
            continue  # what chooses experts stays as it is
        is_table = name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight"))
        if values.ndim == 2 and (is_table or keeps_8_bits(name, 4) or values.shape[1] % GROUP):
            integers, scales = quantize_rows(Checkpoint(model)[name])
            weights[name] = torch.from_numpy(integers * scales)
        elif values.ndim == 2:
            weights[name] = torch.from_numpy(dequantized(model, name))
    save_file(weights, rounded / "model.safetensors", {"format": "pt"})
    wanted = reference_logprobs(load_reference(rounded), tokens).numpy()[np.arange(119), tokens[1:]]
    assert np.abs(found - wanted).max() < 0.02
    exact = reference_logprobs(load_reference(model), tokens).numpy()[np.arange(119), tokens[1:]]
    assert np.abs(found - exact).max() > 0.1, "nothing was rounded"


def test_the_second_start_finds_the_weights(
    model: Path, cache: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_runner(model, weights="int4")
    answers = Driver(first).generate([prompt(40, 1)], 20)
    [file] = cache.iterdir()
    monkeypatch.setattr("penstock.engines.openvino.weights.quantize_groups", None)
    monkeypatch.setattr("penstock.engines.openvino.weights.quantize_rows", None)
    assert Driver(make_runner(model, weights="int4")).generate([prompt(40, 1)], 20) == answers
    assert list(cache.iterdir()) == [file]


def test_each_form_of_4_bits_has_a_file_of_its_own(
    model: Path, cache: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be that of several machines, and of several releases."""
    tokens = prompt(40, 1)
    apart = logprobs(make_runner(model, weights="int4", activations="f32"), tokens)
    [file] = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engines.openvino.weights.settle", lambda *facts: replace(settle(*facts), unpacks=False))
        together = logprobs(make_runner(model, weights="int4", activations="f32"), tokens)
    assert len(list(cache.iterdir())) == 2
    np.testing.assert_allclose(apart, together, atol=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engines.openvino.weights.DIVISION", "other parts")
        make_runner(model, weights="int4", activations="f32")
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr("penstock.engines.openvino.weights.quantize_groups", None)
    np.testing.assert_array_equal(logprobs(make_runner(model, weights="int4", activations="f32"), tokens), apart)
    assert file in cache.iterdir()


def change_a_row(model: Path) -> None:
    """Of the embeddings: a few bytes in the middle of the file, which has the same size afterwards."""
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][41] *= 3
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def test_other_weights_and_other_kinds_have_files_of_their_own(model: Path, cache: Path, make_runner: Any) -> None:
    make_runner(model, weights="int4")
    old = make_runner(model, weights="int8")
    before = Driver(old).generate([[41, 41, 41]], 5)
    size = (model / "model.safetensors").stat().st_size
    change_a_row(model)
    assert (model / "model.safetensors").stat().st_size == size
    new = make_runner(model, weights="int8")
    assert len(list(cache.iterdir())) == 3
    assert Driver(new).generate([[41, 41, 41]], 5) != before
    assert new.cache_identity() != old.cache_identity(), "keys and values on disk would be those of the old row"


def test_a_copy_finds_the_weights(
    model: Path, cache: Path, tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runner(model, weights="int4")
    monkeypatch.setattr("penstock.engines.openvino.weights.quantize_groups", None)
    make_runner(shutil.copytree(model, tmp_path / "copy"), weights="int4")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", [change_a_row, lambda model: (model / "model.safetensors").unlink()])
def test_weights_that_change_while_they_are_read_are_not_kept(
    change: Callable[[Path], None],
    model: Path,
    cache: Path,
    make_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Partly the old ones, partly the new ones, they would be found as one or the other."""

    def quantize(tensor: Any) -> Any:
        if not caplog.records:
            change(model)
            logging.getLogger().warning("changed")
        return quantize_rows(tensor)

    monkeypatch.setattr("penstock.engines.openvino.weights.quantize_rows", quantize)
    make_runner(model, weights="int8")
    assert "changed while they were read" in caplog.text
    assert not list(cache.iterdir())


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"", lambda content: content[:-8]])
def test_a_damaged_file_is_made_again(
    damage: Any, model: Path, cache: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Driver(make_runner(model, weights="int4")).generate([prompt(40, 1)], 20)
    [file] = cache.iterdir()
    whole = file.read_bytes()
    file.unlink()  # it is mapped
    file.write_bytes(damage(whole))
    assert Driver(make_runner(model, weights="int4")).generate([prompt(40, 1)], 20) == answers
    assert "the damaged file of cached weights is rebuilt" in caplog.text
    assert file.read_bytes() == whole


def test_the_oldest_files_go_when_there_are_too_many(model: Path, cache: Path, make_runner: Any) -> None:
    make_runner(model, weights="int8")
    [old] = cache.iterdir()
    make_runner(model, weights="int4", weights_cache=old.stat().st_size + 1000)
    [new] = cache.iterdir()
    assert new != old


def test_no_cache(model: Path, cache: Path, make_runner: Any) -> None:
    make_runner(model, weights="int4", weights_cache=0)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(
    model: Path, cache: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        runner = make_runner(model, weights="int4")
    assert "converted weights stay in memory" in caplog.text
    assert len(Driver(runner).generate([prompt(40, 1)], 20)[0]) == 20


def test_gguf_files_of_four_bits(model: Path, tmp_path: Path, make_runner: Any) -> None:
    small = make_runner(unpack(write_gguf(model, tmp_path / "small.gguf", lambda name: "Q4_0")))
    large = make_runner(unpack(write_gguf(model, tmp_path / "large.gguf", lambda name: "Q5_1")))
    assert "weights int4" in small.info.runner
    assert "weights int8" in large.info.runner


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"weights": "int4", "activations": "bf16"},
            "activations=bf16 cannot be combined with weights=int4 and dtype=f32; int8 and f32 can",
        ),
        ({"activations": "int8"}, "activations=int8 cannot be combined with weights=auto and dtype=f32; f32 can"),
    ],
)
def test_activations_have_to_fit(settings: dict[str, Any], message: str, model: Path, make_runner: Any) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_runner(model, **settings)
