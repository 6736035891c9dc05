"""`TorchRunner`: the model runner on PyTorch."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import PenstockError
from penstock.engines.formats.model_files import eos_token_ids
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.step_sampling import StepSampler
from penstock.engines.torch.checkpoint import read_config
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.device import NAMES, choose_device, choose_dtype, default_threads, free_memory
from penstock.engines.torch.kv_cache import KVCache, size_cache
from penstock.engines.torch.loading import load_config, load_model, max_model_len
from penstock.engines.torch.lora import Adapters
from penstock.engines.torch.lora_targets import watch
from penstock.engines.torch.model import PagedModel
from penstock.engines.torch.probe import inspect_layers, step_memory, verify
from penstock.engines.torch.step import make_step

_BLOCK_SIZES = {"cpu": 32, "cuda": 16}


class TorchRunner:
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: TorchConfig) -> None:
        self._device = device = choose_device(config.device)
        threads = config.threads or default_threads()
        torch.set_num_threads(threads)
        settings = read_config(config.model_dir)
        model_config = load_config(config.model_dir)
        model_len = max_model_len(config, model_config)
        dtype = choose_dtype(config, model_config.dtype, device)
        model = load_model(config.model_dir, model_config, dtype, device)
        layouts, vocab_size = inspect_layers(model, model_len)
        with watch(model) as watched:
            verify(model, layouts, vocab_size)
        self._adapters = Adapters(watched.targets(), config.max_loras, config.max_lora_rank, device)
        block_size = config.block_size or _BLOCK_SIZES[device.type]
        block_bytes = block_size * sum(layout.token_bytes for layout in layouts.values())
        beside = step_memory(model, layouts, min(model_len, config.max_num_batched_tokens))
        num_blocks = size_cache(
            config,
            device,
            free_memory(device) - beside - self._adapters.reserved_bytes,
            max_model_len=model_len,
            block_size=block_size,
            block_bytes=block_bytes,
        )
        self._cache = KVCache(layouts, num_blocks, block_size, device)
        self._model = PagedModel(model, self._cache)
        eos = eos_token_ids(config.model_dir, settings)
        self._table = RequestTable(config.max_num_seqs, model_len, block_size, eos)
        self._sampler = StepSampler(self._table, vocab_size)
        self._load_adapters(config)
        where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
        self._info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            eos_token_ids=eos,
            runner=f"torch {NAMES[dtype]}, {device}, {where}",
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step (`ModelRunner.execute`)."""
        self._table.apply(step)
        self._adapters.apply(step)
        self._cache.copy_blocks(step.block_copies)
        output = ModelRunnerOutput([[] for _ in step.request_ids], failed=self._adapters.failures(step.request_ids))
        if not step.request_ids:
            return output
        table, rows = self._table, self._table.rows_of(step.request_ids)
        computed = np.array(step.num_computed_tokens, np.int64)
        scheduled = np.array(step.num_scheduled_tokens, np.int64)
        for part in self._sampler.parts(rows, computed, scheduled):
            tensors = make_step(
                table.tokens,
                table.block_tables,
                self._info.block_size,
                part.rows,
                part.computed,
                part.scheduled,
                self._device,
            )
            wanted = self._sampler.wanted(part)
            offsets = wanted.offsets(part, tensors.begins)
            self._adapters.choose([step.request_ids[i] for i in part.indices.tolist()], tensors.owners, offsets)
            logits = self._model.compute(tensors, torch.from_numpy(offsets).to(self._device)).cpu().numpy()
            self._sampler.take(step.request_ids, part, wanted, logits, output)
        return output

    def load_adapter(self, key: str, folder: Path) -> None:
        """`AdapterHost.load_adapter`; UnsupportedError when the model was loaded without room for adapters."""
        self._adapters.load(key, folder)

    def unload_adapter(self, key: str) -> None:
        self._adapters.unload(key)

    def reset(self) -> None:
        self._table.clear()
        self._adapters.forget_requests()

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        for name in ("_model", "_cache", "_table", "_sampler", "_adapters"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()  # modules and what answers for their attention refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load_adapters(self, config: TorchConfig) -> None:
        """Those of the start; what is wrong with one is said with its key, for the operator."""
        for key, folder in config.adapters.items():
            try:
                self.load_adapter(key, Path(folder))
            except PenstockError as e:
                raise type(e)(f"LoRA adapter {key}: {e.message}") from e
