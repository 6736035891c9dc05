"""`VLLMHostRunner`: vLLM on a CPU, where the KV cache can be read and written from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from penstock.engines import __version__
from penstock.engines.errors import UnsupportedError
from penstock.engines.host.content_digest import model_digests
from penstock.engines.kit.block_rows import BlockRows, Bytes
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.requests import to_vllm_blocks
from penstock.engines.vllm.runner import VLLMRunner


class BlockMemory(BlockRows):
    """`block_ids` are vLLM's."""

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """`caches`: of each layer, [num_blocks, ...]; layers of several groups can lie in the same memory, at blocks of
        other numbers. Raises UnsupportedError where a block of a layer is not one piece of memory."""
        shared = {cache.data_ptr(): cache for cache in caches}
        super().__init__([_rows(cache, num_blocks) for cache in shared.values()])
        self.layout = repr([(tuple(cache.shape), cache.stride(), str(cache.dtype)) for cache in shared.values()])
        """How numbers lie in a block."""


def _rows(cache: torch.Tensor, num_blocks: int) -> Bytes:
    length = cache.stride(0)
    if cache.device.type != "cpu" or cache.shape[0] != num_blocks or length * num_blocks != cache.numel():
        raise UnsupportedError(f"vLLM's KV cache cannot be read: {tuple(cache.shape)} with strides {cache.stride()}")
    rows: Bytes = cache.as_strided((num_blocks, length), (length, 1)).view(torch.uint8).numpy()
    return rows


def cache_tensors(executor: Any) -> list[torch.Tensor]:
    """Of the one worker, which lives in this process."""
    [caches] = executor.collective_rpc("penstock_kv_caches")
    return list(caches)


class VLLMHostRunner(VLLMRunner):
    """A `VLLMRunner` and `BlockHost`, on one device."""

    def __init__(self, config: VLLMConfig, version: str) -> None:
        super().__init__(config, version)
        self._config = config

    @cached_property
    def _memory(self) -> BlockMemory:
        """Looked for when it is needed: a model whose cache has another form runs as well."""
        num_blocks = self._core.scheduler.kv_cache_config.num_blocks
        return BlockMemory(self._call(cache_tensors, self._executor), num_blocks)

    @property
    def block_bytes(self) -> int:
        """`BlockHost.block_bytes`"""
        return self._memory.block_bytes

    def cache_identity(self) -> str:
        """`BlockHost.cache_identity`. For each kind of processor vLLM has other kernels and layouts."""
        config = self._config
        settings = (self.info.runner, config.quantization, sorted(config.engine_args.items()))
        processor = torch.backends.cpu.get_cpu_capability()
        return repr((__version__, settings, model_digests(config.model_dir), processor, self._memory.layout))

    def read_blocks(self, block_ids: Sequence[int]) -> Bytes:
        """`BlockHost.read_blocks`"""
        return self._memory.read(to_vllm_blocks(block_ids))

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[Bytes]) -> None:
        """`BlockHost.write_blocks`"""
        blocks = to_vllm_blocks(block_ids)
        self._memory.write(blocks, contents)
        self._table.tainted.difference_update(blocks)
