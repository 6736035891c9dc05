"""The KV cache of vLLM on a CPU as a `BlockHost`: what was read of a block is as good elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.contract.runner import BlockHost
from penstock.engines.errors import UnsupportedError
from penstock.engines.registry import EngineSpec, load_runner
from penstock.engines.vllm.block_memory import BlockMemory
from support.runner import Driver, prompt

COUNT = 6


def test_a_request_goes_on_with_copies_of_its_blocks(runner: Any) -> None:
    driver, tokens = Driver(runner), prompt(64, 3)
    expected = driver.generate([tokens], COUNT)[0]
    assert isinstance(runner, BlockHost)
    contents = runner.read_blocks(driver.requests[0].blocks[:2])
    assert contents.shape == (2, runner.block_bytes)
    runner.write_blocks([20, 21], list(contents))
    copy = driver.add(1, [*tokens, expected[0]], num_prompt_tokens=64, blocks=[20, 21], computed=64)
    driver.drop(0)
    for _ in range(COUNT - 1):
        driver.step()
    assert copy.output == expected
    runner.reset()


def test_blocks_of_layers_with_windows_are_kept_as_well(runner: Any, windows_dir: Path) -> None:
    options = {"model_dir": str(windows_dir), "dtype": "f32", "num_blocks": 24, "max_num_seqs": 2}
    windows: Any = load_runner(EngineSpec(runner="vllm", options=options))
    assert windows.cache_identity() != runner.cache_identity() == runner.cache_identity()
    driver = Driver(windows)
    tokens = prompt(64, 4)
    expected = driver.generate([tokens], COUNT)[0]
    again = driver.add(1, tokens)
    driver.drop(0)
    driver.step()
    blocks = [block for table in again.tables for block in table]
    contents = windows.read_blocks(blocks)
    windows.write_blocks(blocks, list(np.zeros_like(contents)))
    assert not windows.read_blocks(blocks).any()
    windows.write_blocks(blocks, list(contents))
    for _ in range(COUNT - 1):
        driver.step()
    assert again.output == expected


def test_layers_in_the_same_memory_count_once() -> None:
    memory = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    blocks = BlockMemory([memory, memory.view(4, 2, 3)], 4)
    assert blocks.block_bytes == 24
    blocks.write([3], list(blocks.read([1])))
    assert memory[3].tolist() == memory[1].tolist()


def test_a_cache_whose_blocks_are_not_in_one_piece_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"KV cache cannot be read: \(2, 4, 6\) with strides"):
        BlockMemory([torch.zeros(4, 2, 6).transpose(0, 1)], 2)
