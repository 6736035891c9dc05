"""Whatever the steps look like, the tokens are those of the whole sequence computed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.step import BlockUpdate
from penstock.engines.errors import EngineError
from support.models import load_reference, make_model, reference_logprobs, reference_tokens
from support.runner import GREEDY, Driver, prompt


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 100])
def test_chunked_prefill(chunk: int, llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    tokens = prompt(90, 1)
    request = driver.add(1, tokens)
    while request.computed < 90:
        output = driver.step({1: min(chunk, 90 - request.computed)})
        assert output.sampled_token_ids == [[]] or request.computed == 90
    for _ in range(9):
        driver.step()
    assert request.output == reference_tokens(llama_reference, tokens, 10)


def test_a_resumed_request_goes_on_where_it_was(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    tokens = prompt(45, 5)
    request = driver.add(1, tokens)
    for _ in range(6):
        driver.step()
    driver.drop(1)
    resumed = driver.add(1, request.tokens, num_prompt_tokens=45)
    driver.step({1: 30})
    for _ in range(5):
        driver.step()
    assert resumed.output == reference_tokens(llama_reference, tokens, 11)


@pytest.mark.parametrize("kv", ["f32", "u8", "u4"])
def test_a_fork_with_a_copied_block_goes_on_alike(kv: str, llama_dir: Path, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir, kv_cache_dtype=kv))
    parent = driver.add(1, prompt(50, 6))
    driver.step()
    tokens = list(parent.tokens)
    blocks = [parent.blocks[0], 60]
    child = driver.add(2, tokens, num_prompt_tokens=50, blocks=blocks, computed=50)
    driver.pending.block_copies.append((parent.blocks[1], 60))
    for _ in range(8):
        driver.step()
    assert child.output == parent.output
    # The copy is a copy: what the child writes does not reach the parent.
    other = driver.add(3, [*tokens[:-1], 9, 9, 9], num_prompt_tokens=50, blocks=[blocks[0], 61], computed=50)
    driver.pending.block_copies.append((parent.blocks[1], 61))
    driver.step()
    assert other.output[-1:] != []
    fresh = Driver(make_runner(llama_dir, kv_cache_dtype=kv))
    alone = fresh.add(1, prompt(50, 6))
    for _ in range(12):
        fresh.step()
    while len(parent.output) < 12:
        driver.step()
    assert parent.output == alone.output


def test_replaced_last_block(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    tokens = prompt(40, 7)
    request = driver.add(1, tokens)
    driver.step()
    driver.pending.block_copies.append((request.blocks[1], 63))
    driver.pending.block_updates.append(BlockUpdate(1, 0, 1, [63]))
    driver.step()
    # Whatever is in the old block now, nobody looks at it.
    driver.pending.block_copies.append((5, request.blocks[1]))
    for _ in range(5):
        driver.step()
    assert request.output == reference_tokens(llama_reference, tokens, 7)


def test_rows_of_dropped_requests_are_reused(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir, max_num_seqs=2))
    for request_id in range(7):
        tokens = prompt(20 + request_id, request_id)
        request = driver.add(request_id, tokens)
        driver.next_block = 1
        for _ in range(3):
            driver.step()
        assert request.output == reference_tokens(llama_reference, tokens, 3)
        driver.drop(request_id)


def test_reset_forgets_all_requests(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    runner = make_runner(llama_dir, max_num_seqs=2)
    for _ in range(3):
        driver = Driver(runner)
        tokens = prompt(30, 8)
        assert driver.generate([tokens, tokens], 3) == [reference_tokens(llama_reference, tokens, 3)] * 2
        runner.reset()


def test_an_empty_step_only_takes_notes(llama_dir: Path, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir))
    driver.add(1, prompt(3, 9))
    assert driver.step({}).sampled_token_ids == []
    assert [len(tokens) for tokens in driver.step().sampled_token_ids] == [1]


@pytest.mark.parametrize(("chunk", "scored"), [(100, 1000), (13, 1000), (100, 9)])
def test_prompt_logprobs(chunk: int, scored: int, llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    runner = make_runner(llama_dir)
    runner._max_scored = scored
    driver = Driver(runner)
    tokens = prompt(60, 10)
    wanted = reference_logprobs(llama_reference, tokens).numpy()
    request = driver.add(1, tokens, SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=3, logprobs=2))
    bystander = driver.add(2, prompt(5, 11))
    entries = []
    driver.step({2: 5, 1: min(chunk, 60)})
    entries += driver.last.prompt_logprobs[1]
    while request.computed < 60:
        driver.step({2: 1, 1: min(chunk, 60 - request.computed)})
        entries += driver.last.prompt_logprobs[1]
    assert [e.token_id for e in entries] == tokens[1:]
    for position, entry in enumerate(entries):
        row = wanted[position]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert entry.rank == 1 + (row > row[entry.token_id]).sum()
        assert [i for i, _ in entry.top] == np.argsort(-row)[:3].tolist()
    sampled = driver.last.logprobs[1][0]
    assert sampled.token_id == request.output[0] == wanted[59].argmax()
    assert sampled.logprob == pytest.approx(wanted[59].max(), abs=1e-4)
    assert sampled.rank == 1
    driver.step()
    assert driver.last.prompt_logprobs == {}
    assert bystander.output == reference_tokens(llama_reference, prompt(5, 11), len(bystander.output))


def test_only_the_row_with_nan_fails(tmp_path: Path, make_runner: Any) -> None:
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
    output = driver.step()
    assert set(output.failed) == {2}
    assert output.sampled_token_ids[1] == []
    assert ill.output == []
    driver.drop(2)
    for _ in range(5):
        assert driver.step().failed == {}
    assert healthy.output == wanted


def test_nan_under_prompt_logprobs(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    reference = load_reference(tmp_path)
    reference.model.embed_tokens.weight.data[77] = float("nan")
    reference.save_pretrained(tmp_path)
    driver = Driver(make_runner(tmp_path))
    driver.add(1, [5, 77, 6, 7], SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0))
    output = driver.step()
    assert set(output.failed) == {1}
    assert output.sampled_token_ids == [[]]


def test_seeded_sampling_does_not_depend_on_the_batch(llama_dir: Path, make_runner: Any) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95)
    runner = make_runner(llama_dir)
    alone = Driver(runner)
    request = alone.add(1, prompt(40, 13), params, seed=99)
    for _ in range(12):
        alone.step()
    runner.reset()
    crowd = Driver(runner)
    crowd.add(5, prompt(9, 14), GREEDY)
    crowd.add(6, prompt(12, 15), params, seed=3)
    same = crowd.add(7, prompt(40, 13), params, seed=99)
    crowd.step({5: 9, 7: 17, 6: 12})
    crowd.step({7: 23, 5: 1})
    for _ in range(11):
        crowd.step()
    assert same.output == request.output
    assert len(set(request.output)) > 4


def test_one_request_too_many(llama_dir: Path, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir, max_num_seqs=2))
    for request_id in range(5):  # as many again as live may have ended in steps that are under way
        driver.add(request_id, [5, 6])
    with pytest.raises(EngineError, match="request 4 is one more than the 4 that there is room for"):
        driver.step()


def test_steps_larger_than_announced(llama_dir: Path, llama_reference: Any, make_runner: Any) -> None:
    driver = Driver(make_runner(llama_dir, max_num_batched_tokens=1))
    tokens = [prompt(length, length) for length in (3, 40, 120)]
    assert driver.generate(tokens, 4) == [reference_tokens(llama_reference, t, 4) for t in tokens]
