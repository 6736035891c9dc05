"""LoRA adapters by name, beside the base model in one batch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from helpers_engine import Driver
from helpers_models import load_reference, reference_tokens
from penstock.engines.registry import EngineSpec, load_runner

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def adapter(model_dir, tmp_path_factory):
    """A folder in PEFT's format, and its weights by layer: the query projections of all layers."""
    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(3)
    weights = {
        layer: (torch.randn(RANK, 128, generator=generator) * 0.3, torch.randn(128, RANK, generator=generator) * 0.3)
        for layer in range(3)
    }
    tensors = {}
    for layer, (a, b) in weights.items():
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder, weights


def test_an_adapter_beside_the_base_model(model_dir, adapter):
    folder, weights = adapter
    prompt = [3 + 7 * i % 250 for i in range(50)]
    reference = load_reference(model_dir)
    reference.generation_config.eos_token_id = None
    plain = reference_tokens(reference, prompt, 20)
    for layer, (a, b) in weights.items():
        reference.model.layers[layer].self_attn.q_proj.weight.data += ALPHA / RANK * b @ a
    adapted = reference_tokens(reference, prompt, 20)
    assert adapted != plain
    options = {"model_dir": str(model_dir), "dtype": "f32", "num_blocks": 24, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 64, "adapters": {"poet": str(folder)}}
    runner = load_runner(EngineSpec(runner="vllm", options=options))
    driver = Driver(runner, max_num_seqs=4, max_num_batched_tokens=64)
    [base], [poet] = driver.add(prompt, 20), driver.add(prompt, 20, adapter="poet")
    driver.run()
    assert driver.tokens[base] == plain
    assert driver.tokens[poet] == adapted
