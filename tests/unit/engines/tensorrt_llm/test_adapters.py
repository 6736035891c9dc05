"""LoRA adapters: checked before a request names them, and never mixed up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, OverloadedError, UnsupportedError
from support.adapters import load_adapter
from support.tensorrt_llm import greedy

PROMPT = list(range(10, 50))


def save(folder: Path, modules: Sequence[str] = ("q_proj", "v_proj"), rank: int = 4, **changes: Any) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    tensors = {}
    for module in modules:
        name, own_rank = f"base_model.model.model.layers.0.{module}", changes.get("rank_pattern", {}).get(module, rank)
        tensors[f"{name}.lora_A.weight"] = np.zeros((own_rank, 8), np.float32)
        tensors[f"{name}.lora_B.weight"] = np.zeros((8, own_rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_requests_run_with_their_adapter(make, tmp_path):
    engine = make(max_loras=2, adapters={"a:1": str(save(tmp_path / "a"))}, max_lora_rank=8)
    assert isinstance(engine.batcher, AdapterHost)
    config = engine.llm.args.lora_config
    assert (config.max_loras, config.max_cpu_loras, config.max_lora_rank) == (2, 2, 8)
    load_adapter(engine.batcher, "b:1", save(tmp_path / "b"))
    first, second = engine.start(PROMPT, adapter="a:1"), engine.start(PROMPT, adapter="b:1")
    plain = engine.start(PROMPT)
    engine.finish(first, second, plain)
    assert engine.tokens[first] == greedy(PROMPT, 8, "a:1")
    assert engine.tokens[second] == greedy(PROMPT, 8, "b:1")
    assert engine.tokens[plain] == greedy(PROMPT, 8)


def test_numbers_are_never_used_twice(make, tmp_path):
    folder = save(tmp_path / "a")
    engine = make(max_loras=1, adapters={"a:1": str(folder)})
    adapters = engine.batcher._adapters
    first = adapters["a:1"].lora_int_id
    engine.batcher.unload_adapter("a:1")
    load_adapter(engine.batcher, "a:2", folder)
    assert adapters["a:2"].lora_int_id != first
    assert adapters["a:2"].lora_path == str(folder)
    with pytest.raises(ModelNotFoundError, match="no LoRA adapter 'a:1' is loaded"):
        engine.start(PROMPT, adapter="a:1")
    engine.batcher.unload_adapter("never there")


def test_one_that_is_loaded_already_or_finds_no_slot_is_refused(make, tmp_path):
    folder = save(tmp_path / "a")
    engine = make(max_loras=1)
    load_adapter(engine.batcher, "a:1", folder)
    with pytest.raises(InvalidRequestError, match="loaded already"):
        load_adapter(engine.batcher, "a:1", folder)
    with pytest.raises(OverloadedError, match="all 1 adapter slots"):
        load_adapter(engine.batcher, "b:1", folder)
    with pytest.raises(UnsupportedError, match="--lora"):
        load_adapter(make().batcher, "a:1", folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 17}, r"rank of 17 is above max_lora_rank=16"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"modules": ["lm_head", "q_proj"]}, "changes lm_head; with TensorRT-LLM it may change q_proj"),
        ({"use_dora": True}, "DoRA"),
        ({"rank_pattern": {"q_proj": 8}}, "differ in rank or scaling"),
        ({"alpha_pattern": {"q_proj": 3.0}}, "differ in rank or scaling"),
    ],
)
def test_adapters_that_do_not_fit(make, tmp_path, changes, message):
    engine = make(max_loras=1)
    with pytest.raises(InvalidRequestError, match=message):
        load_adapter(engine.batcher, "a:1", save(tmp_path / "a", **changes))
    load_adapter(engine.batcher, "b:1", save(tmp_path / "b"))


def test_files_that_are_missing(make, tmp_path):
    engine = make(max_loras=1)
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json"):
        load_adapter(engine.batcher, "a:1", tmp_path)
