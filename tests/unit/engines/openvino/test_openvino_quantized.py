"""Quantized checkpoints: what they stand for, what is held as it is, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.safetensors_file import StoredTensor
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.quantization import quantize_rows
from penstock.engines.openvino.weights import Weights
from support.cpu import needs_int8, own_cache
from support.models import load_reference, make_model, reference_logprobs
from support.quantized import (
    GROUP,
    Levels,
    Tensors,
    awq,
    bnb_int8,
    bnb_nf4,
    fp8,
    gptq,
    packed,
    plain_int8,
    product_and_types,
    reference_of,
    round_to_levels,
    write_quantized,
)
from support.runner import Driver, prompt

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB_INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
Floats = npt.NDArray[np.float32]


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


def shuffled(width: int, group: int = GROUP) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).permutation(np.arange(width) // group)


def of_levels(make: Callable[[Levels], Tensors], bits: int = 4, **options: Any) -> Any:
    order = options.pop("order", None)

    def pack(name: str, matrix: Floats) -> tuple[Tensors, Floats]:
        group_of = None if order is None else order(matrix.shape[1])
        group = options.get("group", GROUP)
        rounded = round_to_levels(
            matrix, bits, symmetric=options["symmetric"], group_of=group_of, group=min(group, matrix.shape[1])
        )
        return make(rounded), rounded.floats()

    return pack


SYMMETRIC, WHOLE_ROWS = {"symmetric": True}, {"group": 1 << 20}
ASYMMETRIC = {"symmetric": False}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (GPTQ, of_levels(gptq, **SYMMETRIC)),
    "gptq, asymmetric": ({**GPTQ, "sym": False}, of_levels(gptq, **ASYMMETRIC)),
    "gptq, second format": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        of_levels(lambda matrix: gptq(matrix, less_one=False), **ASYMMETRIC),
    ),
    "gptq, second format called the first": (GPTQ, of_levels(lambda matrix: gptq(matrix, less_one=False), **SYMMETRIC)),
    "gptq, desc_act": (
        {**GPTQ, "sym": False, "desc_act": True},
        of_levels(gptq, order=shuffled, **ASYMMETRIC),
    ),
    "gptq, int8": ({**GPTQ, "bits": 8, "sym": False}, of_levels(gptq, 8, **ASYMMETRIC)),
    "gptq, int2": ({**GPTQ, "bits": 2, "sym": False}, of_levels(gptq, 2, **ASYMMETRIC)),
    "gptq, whole rows": ({**GPTQ, "group_size": -1}, of_levels(gptq, **SYMMETRIC, **WHOLE_ROWS)),
    "awq": (AWQ, of_levels(awq, **ASYMMETRIC)),
    "pack-quantized": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
        of_levels(lambda matrix: packed(matrix, **SYMMETRIC), **SYMMETRIC),
    ),
    "pack-quantized, asymmetric, ordered": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        of_levels(lambda matrix: packed(matrix, ordered=True, **ASYMMETRIC), order=shuffled, **ASYMMETRIC),
    ),
    "pack-quantized, int8": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        of_levels(lambda matrix: packed(matrix, **SYMMETRIC), 8, **SYMMETRIC, **WHOLE_ROWS),
    ),
    "int-quantized": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        of_levels(plain_int8, 8, **SYMMETRIC, **WHOLE_ROWS),
    ),
    "float-quantized": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda name, matrix: fp8(matrix, None),
    ),
    "fp8, blocks": (
        {**FP8, "weight_block_size": [48, 96]},
        lambda name, matrix: fp8(matrix, (48, 96), "weight_scale_inv"),
    ),
    "fp8, one scale": (FP8, lambda name, matrix: fp8(matrix, matrix.shape)),
    "bitsandbytes, int8": (BNB_INT8, of_levels(bnb_int8, 8, **SYMMETRIC, **WHOLE_ROWS)),
    "bitsandbytes, 4 bits": (BNB, lambda name, matrix: bnb_nf4(matrix, nested=False)),
    "bitsandbytes, 4 bits, nested": (BNB, lambda name, matrix: bnb_nf4(matrix, nested=True)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "weights"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("original") / "model", "qwen2", **WIDE)


def quantized(original: Path, tmp_path: Path, name: str, **changes: Any) -> Path:
    config, pack = FORMATS[name]
    return write_quantized(original, tmp_path / "model", {**config, **changes}, pack)


def open_checkpoint(model: Path) -> Checkpoint:
    return Checkpoint(model, scheme=parse_scheme(json.loads((model / "config.json").read_text())))


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_tensors_stand_for(name: str, original: Path, tmp_path: Path) -> None:
    model = quantized(original, tmp_path, name)
    found, wanted = open_checkpoint(model), load_file(reference_of(model) / "model.safetensors")
    assert set(found) == set(wanted)
    for tensor, values in wanted.items():
        np.testing.assert_allclose(found[tensor].f32(), values.float(), rtol=1e-6)
        if values.ndim == 2:
            np.testing.assert_allclose(found[tensor].rows_f32(5, 11), values[5:11].float(), rtol=1e-6)


def logprobs(runner: Any, tokens: list[int]) -> npt.NDArray[np.float64]:
    driver = Driver(runner)
    driver.add(1, tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    return np.array([entry.logprob for entry in driver.step().prompt_logprobs[1]])


def distance(runner: Any, reference: Path) -> float:
    """The greatest of logarithms of probabilities to those of transformers."""
    tokens = prompt(60, 1)
    wanted = reference_logprobs(load_reference(reference), tokens).numpy()[np.arange(59), tokens[1:]]
    return float(np.abs(logprobs(runner, tokens) - wanted).max())


@pytest.mark.parametrize(
    "name", ["gptq, desc_act", "gptq, int8", "awq", "pack-quantized", "int-quantized", "bitsandbytes, int8"]
)
def test_integers_are_held_as_they_are(
    name: str, original: Path, tmp_path: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With exact activations, against transformers with the same weights; embeddings and head are floats."""
    model = quantized(original, tmp_path, name)
    with caplog.at_level(logging.INFO):
        runner = make_runner(model, activations="f32")
    assert distance(runner, reference_of(model)) < 1e-3
    assert "weights as stored, activations f32" in runner.info.runner
    assert "quantized checkpoint" not in caplog.text


@pytest.mark.parametrize("name", ["int-quantized", "gptq, asymmetric"])
def test_embeddings_may_be_quantized(name: str, original: Path, tmp_path: Path, make_runner: Any) -> None:
    """Those of 4 bits become int8, from which rows can be taken."""
    config, pack = FORMATS[name]
    model = write_quantized(original, tmp_path / "model", config, pack, ("_proj", "embed_tokens"))
    reference = reference_of(model) / "model.safetensors"
    weights = load_file(reference)
    integers, scales = quantize_rows(Checkpoint(reference.parent)["model.embed_tokens.weight"])
    weights["model.embed_tokens.weight"] = torch.from_numpy(integers * scales)
    save_file(weights, reference, {"format": "pt"})
    assert distance(make_runner(model, activations="f32"), reference.parent) < 1e-3


@pytest.mark.parametrize(("bits", "group"), [(4, 48), (4, 120), (4, 15), (8, 30)])
def test_any_group_size(bits: int, group: int, tmp_path: Path) -> None:
    """Of a single row, for which the plugin has kernels of its own."""
    random = np.random.default_rng(0)
    matrix = round_to_levels(random.standard_normal((16, 240), np.float32), bits, symmetric=False, group=group)
    save_file({f"m.{part}": values for part, values in gptq(matrix).items()}, tmp_path / "model.safetensors")
    scheme = parse_scheme({"quantization_config": {**GPTQ, "bits": bits, "group_size": group, "sym": False}})
    row = random.standard_normal((1, 240), np.float32)
    wanted = row @ matrix.floats().T
    found, _ = product_and_types(Weights(Checkpoint(tmp_path, scheme=scheme), "auto"), "m.weight", (16, 240), row)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("bits", "symmetric", "group", "order", "expected"),
    [
        (4, False, 64, None, {"i4", "f32"}),
        (4, False, 240, None, {"i4", "f32"}),
        (4, False, 64, shuffled, {"i4", "f32"}),
        (4, True, 32, None, {"i4"}),  # no shares
        (4, False, 32, None, {"u4"}),
        (2, False, 64, None, {"u4"}),
        (8, False, 64, None, {"u8"}),
    ],
)
def test_zero_points_of_a_checkpoint_may_be_apart(
    bits: int, symmetric: bool, group: int, order: Any, expected: set[str], tmp_path: Path
) -> None:
    width = 240 if group == 240 else 256
    random = np.random.default_rng(0)
    group_of = None if order is None else order(width, group)
    floats = random.standard_normal((16, width), np.float32)
    matrix = round_to_levels(floats, bits, symmetric=symmetric, group=group, group_of=group_of)
    save_file({f"m.{part}": values for part, values in gptq(matrix).items()}, tmp_path / "model.safetensors")
    settings = {**GPTQ, "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order is not None}
    scheme = parse_scheme({"quantization_config": settings})
    weights = Weights(Checkpoint(tmp_path, scheme=scheme), "auto", unpacks=True)
    for count in (1, 5):
        row = random.standard_normal((count, width), np.float32)
        found, types = product_and_types(weights, "m.weight", (16, width), row)
        np.testing.assert_allclose(found, row @ matrix.floats().T, atol=1e-4)
        assert types & {"u4", "i4", "u8", "f32"} == expected


@needs_int8
def test_activations_are_rounded_as_with_other_integers(original: Path, tmp_path: Path, make_runner: Any) -> None:
    info = make_runner(quantized(original, tmp_path, "gptq, asymmetric")).info
    assert "weights as stored, activations int8" in info.runner
    assert (info.work.weights, info.work.activations) == ("int4", "int8")


def test_floats_of_8_bits_become_bf16(
    original: Path, tmp_path: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantized(original, tmp_path, "fp8, blocks")
    with caplog.at_level(logging.INFO):
        runner = make_runner(model)
    assert "14 matrices of the quantized checkpoint have 8-bit floats, which become bf16" in caplog.text
    reference = reference_of(model) / "model.safetensors"
    rounded = {
        name: values.to(torch.bfloat16).float() if "_proj.weight" in name else values
        for name, values in load_file(reference).items()
    }
    save_file(rounded, reference, {"format": "pt"})
    assert distance(runner, reference_of(model)) < 1e-3


@pytest.mark.parametrize("settings", [{}, {"weights": "f32"}])
def test_what_became_floats_is_mapped_from_the_cache(
    settings: dict[str, Any],
    original: Path,
    tmp_path: Path,
    cache: Path,
    make_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that memory holds only what the kernels have packed."""
    model = quantized(original, tmp_path, "fp8, blocks")
    first = distance(make_runner(model, **settings), reference_of(model))
    [file] = cache.iterdir()
    monkeypatch.setattr("penstock.engines.openvino.weights._as_floats", None)
    runner = make_runner(model, **settings)
    assert distance(runner, reference_of(model)) == first
    mapped = [each for each in runner._decoders[0].source.weights._kept if not each.flags.writeable]
    assert sum(each.nbytes for each in mapped) > 0.9 * file.stat().st_size


def test_no_cache_for_floats(original: Path, tmp_path: Path, cache: Path, make_runner: Any) -> None:
    model = quantized(original, tmp_path, "fp8, blocks")
    assert distance(make_runner(model, weights_cache=0, weights="f32"), reference_of(model)) < 1e-3
    make_runner(original)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["gptq, asymmetric", "fp8, one scale", "bitsandbytes, 4 bits, nested"])
def test_weights_may_be_unpacked(name: str, original: Path, tmp_path: Path, make_runner: Any) -> None:
    model = quantized(original, tmp_path, name)
    runner = make_runner(model, weights="f32")
    assert distance(runner, reference_of(model)) < 1e-3
    assert "weights f32," in runner.info.runner


def uneven(width: int) -> npt.NDArray[np.int64]:
    return np.sort(np.random.default_rng(0).integers(0, width // GROUP, width))


def huge_scales(matrix: Levels) -> Tensors:
    found = packed(matrix, **SYMMETRIC)
    return {**found, "weight_scale": found["weight_scale"].float() * 2.0**30}


@pytest.mark.parametrize(
    ("name", "pack", "settings", "message"),
    [
        (
            "gptq, desc_act",
            of_levels(gptq, order=uneven, **ASYMMETRIC),
            {},
            "12 matrices of the quantized checkpoint have groups of different sizes, and are converted to int4",
        ),
        (
            "gptq",
            None,
            {"weights": "int8"},
            "14 matrices of the quantized checkpoint have 4 bits, and are converted",
        ),
        ("bitsandbytes, 4 bits", None, {}, "have 4-bit floats, which become int4"),
        (
            "pack-quantized",
            of_levels(huge_scales, **SYMMETRIC),
            {},
            "have scales beyond float16, and are converted to int8",
        ),
    ],
)
def test_what_is_quantized_again_is_said(
    name: str,
    pack: Any,
    settings: dict[str, Any],
    message: str,
    original: Path,
    tmp_path: Path,
    make_runner: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, whole = FORMATS[name]
    model = write_quantized(original, tmp_path / "model", config, pack or whole)
    with caplog.at_level(logging.INFO):
        make_runner(model, **settings)
    assert message in caplog.text


def test_the_cache_tells_schemes_apart(
    original: Path, tmp_path: Path, cache: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized(original, tmp_path, "gptq, asymmetric")
    answers = Driver(make_runner(model)).generate([prompt(40, 1)], 20)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engines.openvino.weights.carried_groups", None)
        assert Driver(make_runner(model)).generate([prompt(40, 1)], 20) == answers
    settings = json.loads((model / "config.json").read_text())
    settings["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (model / "config.json").write_text(json.dumps(settings))
    assert Driver(make_runner(model)).generate([prompt(40, 1)], 20) != answers
    assert len(list(cache.iterdir())) == 2


def test_biases_of_zeros_are_left_out(tmp_path: Path, make_runner: Any) -> None:
    """AutoGPTQ writes them for all matrices."""
    llama = make_model(tmp_path / "llama", "llama", **WIDE)
    config, pack = FORMATS["gptq"]

    def with_bias(name: str, matrix: Floats) -> tuple[Tensors, Floats]:
        tensors, meant = pack(name, matrix)
        return {**tensors, "bias": torch.full((len(matrix),), value)}, meant

    value = 0.0
    make_runner(write_quantized(llama, tmp_path / "zeros", config, with_bias))
    value = 0.5
    model = write_quantized(llama, tmp_path / "others", config, with_bias)
    with pytest.raises(UnsupportedError, match=r"14 tensors that no part of the model uses: .*\.bias"):
        make_runner(model)


def test_scales_of_an_fp8_cache_are_left_out() -> None:
    stored = {f"model.layers.0.self_attn.{name}": stored_one() for name in ("k_scale", "k_proj.k_scale", "kv_scale")}
    for config in (FP8, compressed("float-quantized", num_bits=8, type="float")):
        scheme = parse_scheme({"quantization_config": config})
        assert scheme is not None
        assert not scheme.assemble(stored)


def stored_one() -> StoredTensor:
    return StoredTensor("F32", (1,), np.ones(1, np.float32).view(np.uint8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method=aqlm, which is not supported; supported are gptq, awq"),
        ({"quant_method": ["gptq"]}, "quant_method="),
        ({**GPTQ, "bits": 3}, "bits=3, which is not supported; supported are 2, 4, 8"),
        ({**GPTQ, "bits": None}, "bits=None"),
        ({**GPTQ, "group_size": 0}, "group_size=0, which is not a number of columns"),
        ({**GPTQ, "sym": "yes"}, "sym=yes, which is neither true nor false"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format=marlin"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format: weights in Marlin's order are not supported"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}}, r"dynamic: other settings for \+:"),
        ({**GPTQ, "dynamic": 3}, "dynamic: other settings for 3"),
        ({**AWQ, "version": "gemv"}, "version=gemv"),
        ({**AWQ, "bits": 8}, "bits=8"),
        ({**AWQ, "zero_point": False}, "zero_point=false"),
        ({**FP8, "fmt": "e5m2"}, "fmt=e5m2"),
        ({**FP8, "weight_block_size": [128]}, r"blocks of \[128\], which are not two sizes"),
        (compressed("marlin-24", num_bits=4), "format=marlin-24"),
        (compressed("pack-quantized", num_bits=3), "num_bits=3"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format=nvfp4"),
        (compressed("float-quantized", num_bits=4, type="float"), "num_bits=4"),
        ({**compressed("dense", num_bits=8), "transform_config": {"R1": {}}}, "rotated weights"),
        ({**compressed("dense", num_bits=8), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "no config_groups"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit, or both"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_scheme({"quantization_config": config})


MODULE = "model.layers.0.mlp.up_proj."


def cut(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[MODULE + part] = tensors[MODULE + part][:-1].clone()

    return change


def without(part: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(MODULE + part)


def put(part: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({MODULE + part: value})


def in_bytes(state: dict[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", without("scales"), "up_proj has no tensor scales"),
        ("gptq", without("qzeros"), "up_proj has no tensor qzeros"),
        ("gptq", cut("scales"), "up_proj.qzeros has shape"),
        ("gptq", cut("qweight"), "up_proj.g_idx has shape"),
        ("gptq", put("g_idx", torch.full((128,), 9, dtype=torch.int32)), "128 columns do not go into 4 groups"),
        ("gptq", put("g_idx", torch.full((128,), -1, dtype=torch.int32)), "128 columns do not go into 4 groups"),
        ("gptq", put("scales", torch.full((4, 256), torch.inf)), "scales of quantized weights that are not finite"),
        ("gptq", put("qzeros", torch.zeros(4, 32)), "up_proj.qzeros has dtype F32, which should be I32"),
        ("gptq", put("lora_A", torch.zeros(4)), "up_proj has lora_A, which is not supported"),
        ("gptq", put("bias", torch.zeros(256, dtype=torch.int32)), "up_proj.bias has dtype I32, and is no part of"),
        ("awq", cut("qzeros"), "up_proj.qzeros has shape"),
        ("awq", cut("qweight"), r"up_proj.weight has shape \(256, 127\), config.json asks for \(256, 128\)"),
        ("pack-quantized", without("weight_shape"), "has no tensor weight_shape"),
        ("pack-quantized", put("weight_shape", torch.tensor([256, -1])), "weight_shape .* does not match"),
        ("pack-quantized", put("weight_shape", torch.tensor([2**40, 128])), "weight_shape .* does not match"),
        ("pack-quantized", cut("weight_scale"), r"scales \(255, 4\) do not match the matrix"),
        ("int-quantized", without("weight_scale"), "has no tensor weight_scale"),
        ("int-quantized", put("weight_zero_point", torch.zeros(3, dtype=torch.int8)), r"zero points \(3,\)"),
        ("fp8, blocks", without("weight_scale_inv"), "has no tensor weight_scale"),
        ("fp8, blocks", cut("weight_scale_inv"), "do not match the matrix"),
        ("bitsandbytes, 4 bits", without("weight.quant_map"), "has no tensor quant_map"),
        ("bitsandbytes, 4 bits", cut("weight"), r"has shape \(16383, 1\), which does not match \(256, 128\)"),
        ("bitsandbytes, 4 bits", cut("weight.absmax"), "absmax has shape"),
        ("bitsandbytes, 4 bits", cut("weight.quant_state.bitsandbytes__nf4"), "is not JSON"),
        (
            "bitsandbytes, 4 bits",
            put("weight.quant_state.bitsandbytes__nf4", in_bytes({"shape": [256, 128], "blocksize": 1 << 40})),
            "blocks of 1099511627776 do not match",
        ),
        ("bitsandbytes, 4 bits, nested", cut("weight.nested_absmax"), "nested_absmax has shape"),
        ("bitsandbytes, int8", put("weight_format", torch.tensor(1, dtype=torch.uint8)), "a weight_format other than"),
        ("bitsandbytes, int8", cut("SCB"), "SCB has shape"),
        ("fp8, one scale", put("weight_scale", torch.tensor([torch.nan])), "scales that are not finite"),
    ],
)
def test_damaged_files(
    name: str, change: Callable[[Tensors], None], message: str, original: Path, tmp_path: Path, make_runner: Any
) -> None:
    model = quantized(original, tmp_path, name)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises((EngineError, UnsupportedError), match=message):
        make_runner(model)
