"""Two steps under way: buffers, what recycled memory may hold, guesses and vectors, and layers with windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.contract.messages import AddRequest, PoolingParams
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.kit.cache_size import group_layers
from support.cpu import needs_bf16
from support.engine import Driver as Core
from support.models import load_reference, make_model, reference_tokens
from support.runner import Driver, prompt


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_tokens_do_not_depend_on_how_many_steps_are_under_way(
    speculative: Any, llama_dir: Path, llama_reference: Any, make_runner: Any
) -> None:
    runner = make_runner(llama_dir)
    prompts = [prompt(40, 1), [7, 8, 9] * 11, prompt(5, 2), prompt(70, 3)]
    for depth in (1, 2):
        core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, steps_in_flight=depth, speculative=speculative)
        ids = [core.add(tokens, 12)[0] for tokens in prompts]
        core.run()
        assert [core.tokens[i] for i in ids] == [reference_tokens(llama_reference, tokens, 12) for tokens in prompts]


def test_guesses_are_verified(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    tokens = prompt(30, 4)
    wanted = reference_tokens(llama_reference, tokens, 9)
    request = driver.add(1, tokens)
    driver.step()
    wrong = (wanted[3] + 1) % 100
    for guesses, kept in (([*wanted[1:3], wrong, 5], wanted[1:4]), (wanted[4:6], wanted[4:7]), ([0, 0], [wanted[7]])):
        driver.pending.drafts[1] = guesses
        assert driver.step({1: 1 + len(guesses)}).sampled_token_ids == [kept]
        request.computed += len(kept) - 1 - len(guesses)
    assert request.output == wanted[:8]


def test_vectors_are_the_last_hidden_states(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    core = Core(make_runner(llama_dir), max_num_seqs=8, max_num_batched_tokens=32)
    [chat] = core.add(prompt(20, 5), 6)
    prompts = {100: prompt(45, 6), 101: prompt(3, 7)}
    for request_id, tokens in prompts.items():
        core._inbox.append(AddRequest((request_id,), tokens, PoolingParams(normalize=False), arrival_time=0.0))
        core.tokens[request_id] = []
    core.run()
    for request_id, tokens in prompts.items():
        with torch.inference_mode():
            states = llama_reference.model(torch.tensor([tokens])).last_hidden_state
        np.testing.assert_allclose(core.ends[request_id].pooled, states[0, -1].numpy(), atol=1e-4)
    assert core.tokens[chat] == reference_tokens(llama_reference, prompt(20, 5), 6)


def test_outputs_stay_while_the_other_buffer_computes(llama_dir: Path, make_runner: Any) -> None:
    runner = make_runner(llama_dir)
    driver = Driver(runner)
    for request_id in range(3):
        driver.add(request_id, prompt(20 + request_id, request_id))
    for _ in range(2):  # both buffers have been used
        driver.step()
    model, other = runner._model, 1 - runner._next_buffer
    kept = model._buffers[other].chosen.get_output_tensor(0).data
    before = kept.copy()
    driver.step()
    assert runner._next_buffer == other
    assert not np.array_equal(model._buffers[1 - other].chosen.get_output_tensor(0).data, before)
    assert np.array_equal(kept, before)


def test_infer_requests_share_one_stream(llama_dir: Path, make_runner: Any) -> None:
    compiled = make_runner(llama_dir)._model._buffers[0].chosen.get_compiled_model()
    assert compiled.get_property("NUM_STREAMS") == 1
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        ("f32", "f32"),
        ("f32", "f16"),
        ("f32", "u8"),
        ("f32", "u8-u4"),
        ("f32", "u4"),
        pytest.param("bf16", "bf16", marks=needs_bf16),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_what_recycled_blocks_hold_reaches_nobody(
    family: str, dtype: str, kv: str, tmp_path: Path, make_runner: Any
) -> None:
    """NaN wherever nobody has written to the cache: prompts, pieces of prompts and decodes read none of it."""
    make_model(tmp_path, family)
    runner = make_runner(tmp_path, dtype=dtype, kv_cache_dtype=kv, num_blocks=96)
    outputs = []
    for content in (0x00, 0xFF):  # each float of 0xFF is NaN, as are the scales of a quantized cache
        for raw in runner._model.cache._raw:
            raw[:] = content
        runner.reset()
        driver = Driver(runner)
        driver.add(1, prompt(75, 9))
        driver.add(2, prompt(3, 1))
        driver.step({1: 20, 2: 3})
        driver.step({1: 33, 2: 1})
        for length in (1, 31, 32, 33):
            driver.add(length + 10, prompt(length, length))
        for _ in range(4):
            assert driver.step().failed == {}
        outputs.append([request.output for request in driver.requests.values()])
    assert outputs[0] == outputs[1]


def test_layers_with_windows_forget_what_lies_behind(tmp_path: Path, make_runner: Any) -> None:
    """Blocks behind the window are given to others while the request still runs."""
    windows = ["sliding_attention"] * 4 + ["full_attention"]
    make_model(
        tmp_path,
        "qwen2-sliding",
        num_hidden_layers=5,
        sliding_window=40,
        max_window_layers=0,
        layer_types=windows,
        eos_token_id=None,
    )
    runner = make_runner(tmp_path, num_blocks=42, max_num_seqs=2)
    assert [group.window for group in runner.info.kv_groups] == [40] * 4 + [0]
    core = Core(runner, max_num_seqs=2, max_num_batched_tokens=32)
    # Without windows, two requests of 230 tokens need 5 groups * 8 blocks each.
    prompts = [prompt(200, 1), prompt(180, 2)]
    ids = [core.add(tokens, 30)[0] for tokens in prompts]
    core.run()
    reference = load_reference(tmp_path)
    assert [core.tokens[i] for i in ids] == [reference_tokens(reference, tokens, 30) for tokens in prompts]
    assert core.stats.preemptions == 0


def test_a_model_whose_layers_all_have_the_same_window(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "mistral", sliding_window=33, eos_token_id=None)
    runner = make_runner(tmp_path, num_blocks=8)
    assert [group.window for group in runner.info.kv_groups] == [33]
    core = Core(runner, max_num_seqs=1, max_num_batched_tokens=32)
    tokens = prompt(300, 3)  # ten blocks, of which it never has more than four
    [request_id] = core.add(tokens, 10)
    core.run()
    assert core.tokens[request_id] == reference_tokens(load_reference(tmp_path), tokens, 10)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([0, 0, 0], [(0, (0, 1, 2))]),
        ([9, 9], [(9, (0, 1))]),
        ([0, 0, 8], [(0, (0,)), (0, (1,)), (8, (2,))]),
        ([8, 8, 8, 8, 0, 0], [(8, (0, 2)), (8, (1, 3)), (0, (4, 5))]),
        ([5, 5, 5, 5, 5, 0] * 2, [(5, (0, 6)), (5, (1, 7)), (5, (2, 8)), (5, (3, 9)), (5, (4, 10)), (0, (5, 11))]),
        ([5, 0] * 5 + [5], [(5, (0, 2, 4, 6, 8, 10)), (0, (1, 3, 5, 7, 9))]),
    ],
)
def test_layers_are_dealt_out(windows: list[int], groups: list[tuple[int, tuple[int, ...]]]) -> None:
    assert [group[:2] for group in group_layers(windows)] == groups


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**8), ("vocab_size", 2**40), ("max_position_embeddings", 10**12), ("hidden_size", "64")],
)
def test_sizes_that_no_model_has(key: str, value: Any, tmp_path: Path, make_runner: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], key: value}))
    with pytest.raises(UnsupportedError, match=f"config.json has {key}="):
        make_runner(tmp_path)


def test_a_kernel_cache_that_is_no_number(llama_dir: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_RUNTIME_CACHE_CAPACITY", "many")
    with pytest.raises(InvalidRequestError, match="CPU_RUNTIME_CACHE_CAPACITY='many' is not a number"):
        make_runner(llama_dir)


def test_a_step_without_requests_between_others(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    runner = make_runner(llama_dir)
    driver = Driver(runner)
    request = driver.add(1, prompt(9, 1))
    driver.step()
    runner.submit(SchedulerOutput())
    assert runner.collect().sampled_token_ids == []
    driver.step()
    assert request.output == reference_tokens(llama_reference, prompt(9, 1), 2)
