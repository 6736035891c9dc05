"""LoRA adapters on the OpenVINO runner, beside what tests/conformance asks of all engines: the tokens are those of the
model with the adapter merged into its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.engines.contract.messages import FinishReason
from penstock.engines.errors import InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.quantization import quantize_rows
from penstock.engines.openvino.runner import OpenVINORunner
from support.adapters import load_adapter
from support.cpu import needs_bf16
from support.engine import Driver
from support.models import (
    LINEAR_LAYERS,
    load_reference,
    make_adapter,
    make_model,
    merge_adapter,
    reference_hidden,
    reference_tokens,
)
from support.runner import prompt


def keep_tensors(adapter: Path, wanted: Callable[[str], bool]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if wanted(name)}, path)


def answers(runner: OpenVINORunner, asked: list[tuple[str, list[int]]], count: int = 10) -> list[list[int]]:
    """In one batch, in chunks: what each (adapter, prompt) gives."""
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=19, enable_prefix_caching=False)
    ids = [driver.add(tokens, count, adapter=key)[0] for key, tokens in asked]
    driver.run()
    return [driver.tokens[i] for i in ids]


@pytest.mark.families(
    *("llama", "granite", "gemma2", "phi3", "gpt2", "gpt-neox", "qwen3-moe", "glm4", "granite-moe-shared"),
    *("gemma3n", "qwen3.5", "qwen3-next", "falcon-h1", "nemotron-h"),
)
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ("lm_head", "v_proj")),
        ("llama-biases", LINEAR_LAYERS),
        ("granite", (*LINEAR_LAYERS, "lm_head")),
        ("olmo2", LINEAR_LAYERS),
        ("gemma2", ("v_proj", "down_proj", "lm_head")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gpt2", ("c_attn", "c_proj")),
        ("gpt-neox", ("query_key_value", "dense_4h_to_h")),
        ("qwen3-moe", ("q_proj", "o_proj")),
        ("glm4", ("k_proj", "gate_up_proj", "down_proj")),
        ("cohere2", LINEAR_LAYERS),
        ("granite-moe-shared", ("q_proj", "input_linear", "output_linear")),
        ("gemma3n", ("q_proj", "down_proj", "linear_right", "per_layer_projection")),
        ("qwen3.5", ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj")),
        ("qwen3-next", ("in_proj_qkvz", "in_proj_ba")),
        ("falcon-h1", ("in_proj", "out_proj", "k_proj", "gate_proj", "lm_head")),
        ("nemotron-h", ("in_proj", "out_proj", "q_proj", "up_proj", "down_proj")),
    ],
)
def test_every_family_s_adapter_answers_like_merged_weights(
    family: str, targets: tuple[str, ...], tmp_path: Path, make_runner: Any
) -> None:
    """Biases, factors of residuals and logits, fused projections, and the output layer, which sees only the tokens
    whose logits are wanted."""
    make_model(tmp_path, family)
    plain = load_reference(tmp_path)
    path = make_adapter(tmp_path / "adapter", plain, targets=targets)
    merged = merge_adapter(load_reference(tmp_path), path)
    runner = make_runner(tmp_path, max_loras=1, adapters={"x": path})
    asked = [("", prompt(30, 2)), ("x", prompt(30, 2)), ("x", prompt(9, 3))]
    wanted = [reference_tokens(merged if key else plain, tokens, 10) for key, tokens in asked]
    assert answers(runner, asked) == wanted
    assert wanted[0] != wanted[1]


def test_the_output_layer_of_tied_embeddings(tmp_path: Path, make_runner: Any) -> None:
    """The embeddings stay as they are."""
    make_model(tmp_path, "qwen2")
    reference = load_reference(tmp_path)
    reference.lm_head.weight = nn.Parameter(reference.lm_head.weight.detach().clone())
    path = make_adapter(tmp_path / "head", reference, targets=("lm_head",))
    merge_adapter(reference, path)
    runner = make_runner(tmp_path, max_loras=1, adapters={"x": path})
    assert answers(runner, [("x", prompt(20, 1))]) == [reference_tokens(reference, prompt(20, 1), 10)]


def test_ranks_and_layers_of_their_own(llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any) -> None:
    """In a place where there was an adapter that changed more, nothing of which is left."""
    full = make_adapter(tmp_path / "full", llama_reference, seed=1, rank=8)
    mixed = make_adapter(
        tmp_path / "mixed", llama_reference, seed=2, rank=4, targets=("q_proj", "up_proj"), use_rslora=True
    )
    keep_tensors(mixed, lambda name: "layers.1." in name or "layers.0.mlp" in name)
    wide = make_adapter(tmp_path / "wide", llama_reference, seed=3, rank=6, targets=("up_proj",))
    tensors = load_file(mixed / "adapter_model.safetensors")
    other = {
        name: tensor for name, tensor in load_file(wide / "adapter_model.safetensors").items() if "layers.2" in name
    }
    save_file(tensors | other, mixed / "adapter_model.safetensors")
    config = json.loads((mixed / "adapter_config.json").read_text())
    # rslora: alpha / sqrt(rank), which is 2 for both
    patterns = {"rank_pattern": {"layers.2.mlp.up_proj": 6}, "alpha_pattern": {"layers.2.mlp.up_proj": 2 * 6**0.5}}
    (mixed / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4.0} | patterns))
    runner = make_runner(llama_dir, max_loras=1, adapters={"a:1": full})
    runner.unload_adapter("a:1")
    load_adapter(runner, "a:2", mixed)
    merged = merge_adapter(load_reference(llama_dir), mixed)
    asked = [("a:2", prompt(30, 1)), ("", prompt(30, 1)), ("a:2", prompt(12, 2))]
    wanted = [reference_tokens(merged if key else llama_reference, tokens, 10) for key, tokens in asked]
    assert answers(runner, asked) == wanted


def test_steps_read_the_rows_of_their_adapters(
    llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {f"{n}": make_adapter(tmp_path / f"{n}", llama_reference, seed=n, rank=n) for n in (3, 4)}
    narrow = make_adapter(tmp_path / "narrow", llama_reference, targets=("o_proj",), rank=2)
    runner = make_runner(llama_dir, max_loras=3, max_lora_rank=8, adapters={**paths, "narrow": narrow})
    adapters = runner._adapters
    seen: list[dict[str, tuple[int, int]]] = []
    bind = adapters.bind

    def observe(request: Any, rows: Any) -> None:
        seen.append(dict(zip(adapters._kinds, rows, strict=True)))
        bind(request, rows)

    monkeypatch.setattr(adapters, "bind", observe)
    for key, rows in (("", (0, 0)), ("3", (0, 3)), ("4", (8, 12)), ("narrow", (16, 18))):
        answers(runner, [(key, prompt(5, 1))], 3)
        assert seen[-1]["o_proj"] == rows
        assert seen[-1]["q_proj"] == ((0, 0) if key == "narrow" else rows)
        assert seen[-1]["lm_head"] == (0, 0)
    answers(runner, [("3", prompt(5, 1)), ("narrow", prompt(5, 1))], 3)
    assert (seen[-1]["o_proj"], seen[-1]["q_proj"]) == ((0, 18), (0, 3))
    answers(runner, [("4", prompt(5, 1)), ("narrow", prompt(5, 1))], 3)
    assert seen[-1]["o_proj"] == (0, 18)  # has them, and is less than twice as long
    answers(runner, [("4", prompt(5, 1))], 3)
    assert seen[-1]["o_proj"] == (8, 12)


def test_what_overflows_spoils_no_other_request(
    llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any
) -> None:
    path = make_adapter(tmp_path / "large", llama_reference)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name: tensor * 1e38 for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        (path / "adapter_config.json").read_text().replace('"lora_alpha": 8', '"lora_alpha": 1e-30')
    )
    runner = make_runner(llama_dir, max_loras=1, adapters={"large": path})
    driver = Driver(runner, max_num_seqs=4)
    [lost], [fine] = driver.add(prompt(20, 1), 6, adapter="large"), driver.add(prompt(20, 2), 6)
    driver.run()
    assert driver.ends[lost].finish_reason is FinishReason.ERROR
    assert driver.tokens[fine] == reference_tokens(llama_reference, prompt(20, 2), 6)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "phi3")
    reference = load_reference(tmp_path)
    fused = make_adapter(tmp_path / "fused", reference, targets=("qkv_proj",))
    with pytest.raises(UnsupportedError, match="loaded without LoRA: --lora or --lora-directory"):
        load_adapter(make_runner(tmp_path), "a:1", fused)
    runner = make_runner(tmp_path, max_loras=1, max_lora_rank=8)
    llama = load_reference(make_model(tmp_path / "llama", "llama"))
    with pytest.raises(
        InvalidRequestError, match=r"no linear layer model\.layers\.0\.self_attn\.q_proj that an adapter"
    ):
        load_adapter(runner, "a:2", make_adapter(tmp_path / "split", llama, targets=("q_proj",)))
    with pytest.raises(InvalidRequestError, match="_proj is not finite in the model's precision"):
        load_adapter(runner, "a:3", make_adapter(tmp_path / "far", reference, targets=("o_proj",), lora_alpha=1e50))
    with pytest.raises(UnsupportedError, match="DoRA"):
        load_adapter(runner, "a:4", make_adapter(tmp_path / "dora", reference, use_dora=True))
    load_adapter(runner, "a:5", fused)
    with pytest.raises(OverloadedError, match="all 1 adapter slots are taken"):
        load_adapter(runner, "a:6", fused)


def test_experts_have_no_adapters(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "qwen2-moe")
    runner = make_runner(tmp_path, max_loras=1)
    expert = make_adapter(tmp_path / "expert", load_reference(make_model(tmp_path / "llama", "llama")))
    path = expert / "adapter_model.safetensors"
    save_file({n.replace(".mlp.", ".mlp.experts.0."): t for n, t in load_file(path).items() if ".mlp." in n}, path)
    with pytest.raises(InvalidRequestError, match=r"no linear layer model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        load_adapter(runner, "a:1", expert)


def test_room_is_kept_for_adapters(llama_dir: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All linear layers: 3 x (4 of attention, 3 of the MLP) and the output layer; 4 bytes a number."""
    monkeypatch.setattr("penstock.engines.openvino.runner.available_memory", lambda: 40 << 20)
    block = 32 * 768
    attention, mlp = 64 + 64 + 2 * (64 + 32) + 64 + 64, 3 * (64 + 96)
    slots = 4 * 5 * 16 * (3 * (attention + mlp) + 64 + 384)
    counts = [make_runner(llama_dir, num_blocks=None, max_num_seqs=256, max_loras=n).info.num_blocks for n in (0, 5)]
    assert counts == [(40 << 20) // 2 // block, ((40 << 20) - slots) // 2 // block]


def test_vectors_follow_the_adapter_of_their_request(
    llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any
) -> None:
    path = make_adapter(tmp_path / "adapter", llama_reference)
    merged = merge_adapter(load_reference(llama_dir), path)
    driver = Driver(
        make_runner(llama_dir, max_loras=1, adapters={"x": path}), max_num_seqs=4, max_num_batched_tokens=16
    )
    changed, base = driver.pool(prompt(40, 1), adapter="x"), driver.pool(prompt(40, 1))
    driver.run()
    assert driver.ends[changed].pooled == pytest.approx(reference_hidden(merged, prompt(40, 1)), abs=1e-4)
    assert driver.ends[base].pooled == pytest.approx(reference_hidden(llama_reference, prompt(40, 1)), abs=1e-4)


def test_beside_quantized_weights(tmp_path: Path, make_runner: Any) -> None:
    """The adapter stays as it is: the tokens are those of the rounded weights with the adapter merged into them."""
    make_model(tmp_path, "llama")
    rounded = load_reference(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if parameter.ndim == 2:
                values, scales = quantize_rows(checkpoint[name])
                parameter.copy_(torch.from_numpy(values * scales))
    path = make_adapter(tmp_path / "adapter", rounded)
    merged = merge_adapter(rounded, path)
    settings = {"weights": "int8", "activations": "f32", "weights_cache": 0}
    runner = make_runner(tmp_path, max_loras=1, adapters={"x": path}, **settings)
    assert answers(runner, [("x", prompt(30, 1))]) == [reference_tokens(merged, prompt(30, 1), 10)]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        pytest.param({"weights": "int4", "weights_cache": 0}, 1.0, id="int4"),
        pytest.param({"dtype": "bf16"}, 0.5, id="bf16", marks=needs_bf16),
    ],
)
def test_lower_precisions(settings: dict[str, Any], error: float, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    plain = load_reference(tmp_path)
    path = make_adapter(tmp_path / "adapter", plain, dtype=torch.bfloat16)
    with torch.inference_mode():
        base, merged = (
            torch.log_softmax(model(torch.tensor([prompt(40, 1)])).logits[0, -1].double(), dim=-1)
            for model in (plain, merge_adapter(load_reference(tmp_path), path))
        )
    driver = Driver(make_runner(tmp_path, max_loras=1, adapters={"x": path}, **settings), enable_prefix_caching=False)
    driver.add(prompt(40, 1), 1, adapter="x", logprobs=0)
    outputs = []
    while driver.core.has_work or not outputs:
        outputs += driver.step()
    [entry] = [entry for output in outputs for entry in output.logprobs or ()]
    assert entry.logprob == pytest.approx(float(merged[entry.token_id]), abs=error)
    assert abs(entry.logprob - float(base[entry.token_id])) > 1
