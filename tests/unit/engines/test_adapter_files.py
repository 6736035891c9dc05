"""Adapter files as PEFT saves them: what is read from them, and what is refused."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.formats.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter

PATHS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj"]
INPUTS, OUTPUTS, RANK = 6, 10, 4


def tensors_for(paths: list[str] = PATHS, rank: int = RANK, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    found = {}
    for n, path in enumerate(paths):
        generator = torch.Generator().manual_seed(n)
        for side, shape in ("A", (rank, INPUTS)), ("B", (OUTPUTS, rank)):
            found[f"base_model.model.{path}.lora_{side}.weight"] = torch.randn(shape, generator=generator).to(dtype)
    return found


def write(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A good adapter of rank 4, with changes to its settings; None removes one."""
    save_file(tensors_for() if tensors is None else tensors, folder / WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "peft_version": "0.19.1",
        "base_model_name_or_path": "somewhere/else",
        "inference_mode": True,
        "r": RANK,
        "lora_alpha": 12,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "down_proj"],
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "loftq_config": {},
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        **changes,
    }
    (folder / CONFIG_FILE).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layers_by_path(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = tensors_for(dtype=dtype)
    layers = read_adapter(write(tmp_path, tensors), 16)
    assert sorted(layers) == sorted(PATHS)
    for path, layer in layers.items():
        assert layer.scaling == 3.0
        for side, stored in ("A", layer.a), ("B", layer.b):
            wanted = tensors[f"base_model.model.{path}.lora_{side}.weight"].float().numpy()
            np.testing.assert_array_equal(stored.f32(), wanted)


@pytest.mark.parametrize(
    "targets", [PATHS, ["self_attn.q_proj", "mlp.down_proj"], "all-linear", r".*\.(q_proj|down_proj)", None]
)
def test_ways_to_name_layers(targets: Any, tmp_path: Path) -> None:
    assert len(read_adapter(write(tmp_path, target_modules=targets), 16)) == 3


def test_scaling_by_the_root_of_the_rank(tmp_path: Path) -> None:
    layers = read_adapter(write(tmp_path, use_rslora=True), 16)
    assert [layer.scaling for layer in layers.values()] == [12 / math.sqrt(RANK)] * 3


@pytest.mark.parametrize(
    "key", ["model.layers.0.mlp.down_proj", "mlp.down_proj", "down_proj", "^model.layers.0.mlp.down_proj", r"\d+.*proj"]
)
def test_ranks_and_alphas_of_single_layers(key: str, tmp_path: Path) -> None:
    odd = PATHS[1]
    tensors = tensors_for() | tensors_for([odd], rank=2)
    if key.startswith(r"\d"):  # of every layer
        tensors = tensors_for(rank=2)
    layers = read_adapter(write(tmp_path, tensors, rank_pattern={key: 2}, alpha_pattern={key: 5, "proj": 99}), 16)
    assert layers[odd].a.shape == (2, INPUTS)
    assert layers[odd].scaling == 2.5
    assert layers[PATHS[0]].scaling == (2.5 if key.startswith(r"\d") else 3.0)


def test_a_key_matches_from_a_dot_on(tmp_path: Path) -> None:
    layers = read_adapter(write(tmp_path, alpha_pattern={"own_proj": 5, "q_proj": 8}), 16)
    assert [layers[path].scaling for path in PATHS] == [2.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "ADALORA"}, "adapters of type ADALORA are not supported, only LORA"),
        ({"peft_type": "PREFIX_TUNING", "r": None}, "adapters of type PREFIX_TUNING"),
        ({"use_dora": True}, "use_dora=True: DoRA"),
        ({"lora_bias": True}, "lora_bias=True: biases"),
        ({"bias": "lora_only"}, "bias=lora_only: biases"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: modules that were trained whole"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "aLoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4: an adapter that belongs to changed"),
        ({"rank_pattern": {"(a+)+b": 2}}, r"rank_pattern has \(a\+\)\+b: supported are names"),
        ({"alpha_pattern": {".*.*.*.*": 2}}, "alpha_pattern has .*: supported are names"),
    ],
)
def test_kinds_that_are_not_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_adapter(write(tmp_path, **changes), 16)


@pytest.mark.parametrize("init", ["gaussian", "EVA", False])
def test_initial_values_that_do_not_matter(init: Any, tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path, init_lora_weights=init), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": None}, "is no configuration of LoRA: .*peft_type"),
        ({"r": None}, "is no configuration of LoRA: .*`r`"),
        ({"r": 0}, r"is no configuration of LoRA: .*>= 1.*\$\.r"),
        ({"r": "4"}, "is no configuration of LoRA"),
        ({"lora_alpha": "much"}, "is no configuration of LoRA"),
        ({"target_modules": [1]}, "is no configuration of LoRA"),
        ({"rank_pattern": {"q_proj": -1}}, "is no configuration of LoRA"),
        ({"r": 8}, r"of model\S+ have shapes \[4, 6\] and \[10, 4\], not \[8, inputs\] and \[outputs, 8\]"),
        ({"rank_pattern": {"down_proj": 2}}, r"down_proj have shapes \[4, 6\] and \[10, 4\], not \[2, inputs\]"),
        ({"target_modules": ["down_proj"]}, r"tensors of model.layers.0.self_attn.q_proj, which target_modules does"),
        ({"target_modules": ["proj"]}, "which target_modules does not name"),
        ({"layers_to_transform": 0}, r"tensors of model\.layers\.11\.\S+, which layers_to_transform does not name"),
        ({"layers_to_transform": [1, 11]}, r"tensors of model\.layers\.0\.\S+, which layers_to_transform does not"),
    ],
)
def test_settings_at_odds(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_adapter(write(tmp_path, **changes), 16)
    assert not isinstance(caught.value, UnsupportedError)


def test_layers_that_are_named_by_number(tmp_path: Path) -> None:
    assert len(read_adapter(write(tmp_path, layers_to_transform=[0, 11]), 16)) == 3


def test_ranks_above_the_limit(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_adapter(tmp_path, 4)
    with pytest.raises(InvalidRequestError, match="rank of 4 is above max_lora_rank=3"):
        read_adapter(tmp_path, 3)


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 6), "lora_embedding_A: only"),
        ("base_model.model.lm_head.weight", torch.zeros(4, 6), "lm_head.weight: only lora_A and lora_B of linear"),
        (f"{STEM}.lora_magnitude_vector", torch.zeros(10), "lora_magnitude_vector: only"),
        (f"{STEM}.lora_B.bias", torch.zeros(10), r"lora_B\.bias: only"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(4, 6), "only lora_A and lora_B"),
        ("base_model.model.q_proj.lora_A.weight", torch.zeros(4, 6), "has only lora_A of q_proj"),
        (f"{STEM}.lora_A.weight", torch.zeros(4, 6, 1, 1), r"have shapes \[4, 6, 1, 1\]"),
        (f"{STEM}.lora_A.weight", torch.zeros(24), r"have shapes \[24\]"),
        (f"{STEM}.lora_B.weight", torch.zeros(4, 10), r"have shapes \[4, 6\] and \[4, 10\]"),
        (f"{STEM}.lora_B.weight", torch.zeros(10, 4, dtype=torch.int8), "has dtype I8; supported are F32, F16, BF16"),
        ("x" * 10_000, torch.zeros(1), r"x{300} \.\.\.: only"),
    ],
)
def test_tensors_that_are_out_of_place(name: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_adapter(write(tmp_path, tensors_for() | {name: tensor}), 16)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json cannot be read: No such file"):
        read_adapter(folder, 16)
    folder.mkdir()
    write(folder)
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match=r"adapter_model\.bin, a pickle, which is never loaded"):
        read_adapter(folder, 16)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(InvalidRequestError, match=r"has no adapter_model\.safetensors$"):
        read_adapter(folder, 16)
    (folder / CONFIG_FILE).unlink()
    (folder / CONFIG_FILE).mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be read: Is a directory"):
        read_adapter(folder, 16)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"peft_type": "LORA"', b"\xff\xfe", b"[" * 100_000, b" " * ((16 << 20) + 1)]
)
def test_settings_that_are_no_settings(text: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json (is no configuration|has more than)"):
        read_adapter(tmp_path, 16)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", (100).to_bytes(8, "little") + b"{" * 100])
def test_weights_that_are_no_weights(data: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors cannot be read"):
        read_adapter(tmp_path, 16)
    save_file({}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors has no tensors"):
        read_adapter(tmp_path, 16)


SHARED_FOLDER = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_reading(folder: Path) -> None:
    """Layers come out whole, or an error that says nothing of the machine."""
    error, layers = None, {}
    try:
        layers = read_adapter(folder, 16)
    except InvalidRequestError as e:
        error = e
    assert (error is None) == bool(layers)
    if error is not None:
        assert str(folder) not in error.message
        assert len(error.message) < 2000
    for layer in layers.values():
        assert layer.a.f32().shape[0] == layer.b.f32().shape[1]


@SHARED_FOLDER
@given(data=st.data())
def test_damaged_weights(data: st.DataObject, tmp_path: Path) -> None:
    good = (write(tmp_path) / WEIGHTS_FILE).read_bytes()
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else good)
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, min(len(damaged), 900) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / WEIGHTS_FILE).write_bytes(damaged)
    check_reading(tmp_path)


KEYS = ["peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "bias"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["q_proj", "(", "a.*"]), inner),
    max_leaves=5,
)


@SHARED_FOLDER
@given(changes=st.dictionaries(st.sampled_from([*KEYS, "layers_to_transform", "init_lora_weights"]), VALUES))
def test_strange_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    check_reading(write(tmp_path, **changes))


def test_settings_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path) / CONFIG_FILE
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert set(read_adapter(tmp_path, 8)) == set(PATHS)
