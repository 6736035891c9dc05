"""Whatever the steps look like, the tokens are those of the whole sequence computed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.step import BlockUpdate
from penstock.engines.errors import EngineError
from penstock.engines.kit.batch import GroupTables, StepBatch
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.torch import attention as steps
from penstock.engines.torch.attention import View, make_step
from support.models import load_reference, make_model, reference_logprobs, reference_tokens
from support.runner import Driver, prompt


def test_copied_and_replaced_blocks(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    tokens = prompt(40, 7)
    request = driver.add(1, tokens)
    driver.step()
    # A chain of copies is followed in order: 1 -> 62 -> 63.
    driver.pending.block_copies += [(request.blocks[1], 62), (62, 63)]
    driver.pending.block_updates.append(BlockUpdate(1, 0, 1, [63]))
    driver.step()
    driver.pending.block_copies += [(5, request.blocks[1]), (5, 62)]
    for _ in range(5):
        driver.step()
    assert request.output == reference_tokens(llama_reference, tokens, 7)


def test_decodes_of_very_different_lengths(
    llama_dir: Path, llama_reference: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SLACK", 4)
    monkeypatch.setattr(steps, "_MOST_KEYS", 100)
    monkeypatch.setattr(steps, "_MOST_SCORES", 1000)
    driver = Driver(make_runner(llama_dir))
    tokens = [prompt(length, length) for length in (120, 3, 40, 41, 90, 7)]
    assert driver.generate(tokens, 5) == [reference_tokens(llama_reference, t, 5) for t in tokens]


def test_what_attends_together() -> None:
    """A decode of 5, a chunk of 3 behind 8, a decode of 200 and one of 6; blocks of 4, a window of 2 in a group of its
    own."""
    computed, scheduled = [4, 8, 199, 5], [1, 3, 1, 1]
    positions = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(computed, scheduled, strict=True)]
    )
    tables = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)[::-1]
    whole = GroupTables(tables, np.zeros(4, np.int64), np.array([2, 3, 50, 2]))
    near = GroupTables(tables + 1000, np.array([0, 1, 49, 1]), np.array([2, 3, 50, 2]))
    batch = StepBatch(
        token_ids=np.arange(100, 106, dtype=np.int32),
        positions=positions,
        begins=np.array([0, 1, 4, 5, 6]),
        computed=np.array(computed),
        scheduled=np.array(scheduled),
        groups=(whole, near),
        logits_at=np.array([0, 3]),
        adapter_slots=np.zeros(4, np.int64),
        wants_hidden=False,
    )
    step = make_step(batch, [View(0, 0), View(1, 2), View(0, 3)], 4, torch.device("cpu"))
    assert step.positions.tolist() == [4, 5, 199, 8, 9, 10]
    assert step.token_ids.tolist() == [100, 105, 104, 101, 102, 103]
    assert step.places.tolist() == [0, 3, 4, 5, 2, 1]
    assert step.owners.tolist() == [0, 3, 2, 1, 1, 1]
    own = [772, 5, 455, 520, 521, 522]
    assert step.slot_mappings.tolist() == [own, [slot + 4000 for slot in own], own]
    short, long, chunk = step.slices
    assert [part.views[0][0].whole for part in step.slices] == [False] * 3
    reach, slots = short.views[0]
    assert slots.tolist() == [[768, 769, 770, 771, 772, 772], [0, 1, 2, 3, 4, 5]]
    assert reach.mask is not None
    assert reach.mask[:, 0, 0].tolist() == [[True] * 5 + [False], [True] * 6]
    assert short.views[1][1].tolist() == [[4771, 4772], [4004, 4005]]
    assert short.views[1][0].mask.all()
    assert long.views[0][0].mask is None
    assert long.views[2][1].tolist() == [[453, 454, 455]]
    assert chunk.views[0][0].mask[0, 0].sum(dim=1).tolist() == [9, 10, 11]
    assert chunk.views[1][1].tolist() == [[4519, 4520, 4521, 4522]]
    assert chunk.views[1][0].mask[0, 0].tolist() == [
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize(("chunk", "scored"), [(100, 1000), (13, 1000), (100, 9)])
def test_prompt_logprobs(chunk: int, scored: int, llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    runner = make_runner(llama_dir)
    runner._max_scored = scored
    driver = Driver(runner)
    tokens = prompt(60, 10)
    wanted = reference_logprobs(llama_reference, tokens).numpy()
    request = driver.add(1, tokens, SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=3, logprobs=2))
    bystander = driver.add(2, prompt(5, 11))
    driver.step({2: 5, 1: min(chunk, 60)})
    entries = list(driver.last.prompt_logprobs[1])
    while request.computed < 60:
        driver.step({2: 1, 1: min(chunk, 60 - request.computed)})
        entries += driver.last.prompt_logprobs[1]
    assert [e.token_id for e in entries] == tokens[1:]
    for row, entry in zip(wanted, entries, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [i for i, _ in entry.top] == np.argsort(-row)[:3].tolist()
    [sampled] = driver.last.logprobs[1]
    assert sampled.token_id == request.output[0] == wanted[59].argmax()
    assert sampled.logprob == pytest.approx(wanted[59].max(), abs=1e-4)
    driver.step()
    assert driver.last.prompt_logprobs == {}
    assert bystander.output == reference_tokens(llama_reference, prompt(5, 11), len(bystander.output))


def test_nan_stays_with_its_request_and_not_in_its_blocks(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    reference = load_reference(tmp_path)
    poison = 77
    clean = [t for t in prompt(30, 12) if t != poison]
    wanted = reference_tokens(reference, clean, 6)
    reference.model.embed_tokens.weight.data[poison] = float("nan")
    reference.save_pretrained(tmp_path)
    assert poison not in wanted
    driver = Driver(make_runner(tmp_path))
    healthy, ill = driver.add(1, clean), driver.add(2, [*clean, poison])
    scored = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    driver.add(3, [5, poison, 6, 7], scored)
    output = driver.step()
    assert set(output.failed) == {2, 3}
    assert output.sampled_token_ids[1:] == [[], []]
    driver.drop(2)
    driver.drop(3)
    # Its blocks, NaN and all, go to the next one.
    heir = driver.add(4, clean, blocks=ill.blocks)
    for _ in range(5):
        assert driver.step().failed == {}
    assert healthy.output == wanted
    assert heir.output == wanted[:5]


def test_seeded_tokens_are_those_of_the_openvino_runner(llama_dir: Path, make_runner: Any) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, top_k=100, repetition_penalty=1.2, presence_penalty=0.3
    )
    outputs = []
    other = OpenVINORunner(OpenVINOConfig(llama_dir, dtype="f32", threads=1, num_blocks=64, max_num_seqs=8))
    for runner in (other, make_runner(llama_dir)):
        driver = Driver(runner)
        request = driver.add(1, prompt(40, 13), params, seed=99)
        driver.add(2, prompt(9, 14), params, seed=3)
        driver.step({1: 17, 2: 9})
        for _ in range(12):
            driver.step()
        outputs.append(request.output)
    other.close()
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 4


def test_reset_empty_steps_and_one_request_too_many(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    runner = make_runner(llama_dir, max_num_seqs=2)
    for _ in range(3):
        driver = Driver(runner)
        assert driver.step({}).sampled_token_ids == []
        tokens = prompt(30, 8)
        assert driver.generate([tokens, tokens], 3) == [reference_tokens(llama_reference, tokens, 3)] * 2
        runner.reset()
    driver = Driver(runner)
    for request_id in range(5):  # as many again as live may have ended in steps that are under way
        driver.add(request_id, [5, 6])
    with pytest.raises(EngineError, match="request 4 is one more than the 4 that there is room for"):
        driver.step()


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_auto_is_the_checkpoint_s_precision_with_logprobs_near_f32(
    stored: str, dtype: str, tmp_path: Path, make_runner: Any
) -> None:
    """auto is the checkpoint's own; logprobs are those of f32 within the precision."""
    make_model(tmp_path, "llama", dtype=getattr(torch, stored))
    runner = make_runner(tmp_path, dtype="auto", kv_cache_dtype=dtype)
    assert runner.info.runner.startswith(f"torch {dtype},")
    tokens = prompt(50, 1)
    driver = Driver(runner)
    driver.add(1, tokens, SamplingParams(max_tokens=2, temperature=0.0, logprobs=0))
    driver.step({1: 20})
    [entry] = driver.step().logprobs[1]
    wanted = reference_logprobs(load_reference(tmp_path), tokens)[-1]
    assert entry.logprob == pytest.approx(float(wanted[entry.token_id]), abs=0.5)


def test_a_cache_sized_by_what_can_be_used(llama_dir: Path, make_runner: Any) -> None:
    assert make_runner(llama_dir, num_blocks=None, max_model_len=100).info.num_blocks == 8 * 4
