"""`VLLMHostRunner`: vLLM on a CPU, where the KV cache can be read and written from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from penstock.engines import __version__
from penstock.engines.host.content_digest import model_digests
from penstock.engines.kit.block_rows import Bytes
from penstock.engines.vllm.block_memory import BlockMemory, cache_tensors
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.requests import to_vllm_blocks
from penstock.engines.vllm.runner import VLLMRunner


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
