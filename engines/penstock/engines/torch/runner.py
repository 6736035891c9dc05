"""`TorchRunner`: the model runner on PyTorch."""

from __future__ import annotations

import gc

import torch

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.formats.model_files import eos_token_ids
from penstock.engines.kit.adapter_slots import WithAdapters, load_configured
from penstock.engines.kit.cache_size import StateSpace, check_model_sizes, max_model_len, num_blocks, state_interval
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.torch.attention import TorchKVCache, bytes_of_block, groups_of
from penstock.engines.torch.config import NAMES, TorchConfig, choose_device, choose_dtype, default_threads, free_memory
from penstock.engines.torch.loading import (
    check_rope,
    load_config,
    load_model,
    longest_context,
    read_config,
    weights_reported,
)
from penstock.engines.torch.lora import TorchAdapters, watch
from penstock.engines.torch.model import PagedModel, ThreadedModel
from penstock.engines.torch.probe import count_work, inspect_layers, step_memory, verify
from penstock.engines.torch.recurrent import TorchStates, bytes_of_row
from penstock.kvcache import KVGroup

_BLOCK_SIZES = {"cpu": 32, "cuda": 16}

_SHARE_OF_FREE_MEMORY = {"cpu": 0.5, "cuda": 0.9}
"""Of what is free once the model is loaded; on the CPU the rest is for activations and other processes."""


class TorchRunner(StepRunner, WithAdapters[TorchAdapters]):
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: TorchConfig, report: Report = silent) -> None:
        self._device = device = choose_device(config.device)
        threads = config.threads or default_threads()
        torch.set_num_threads(threads)
        settings = read_config(config.model_dir)
        check_model_sizes(settings.get("text_config") or settings)
        model_config = load_config(config.model_dir)
        model_len = max_model_len(config.max_model_len, longest_context(model_config, config.max_model_len))
        check_rope(model_config, model_len)
        dtype = choose_dtype(config, model_config.dtype, device)
        with weights_reported(report):
            model = load_model(config.model_dir, model_config, dtype, device)
        layers, vocab_size = inspect_layers(model, model_len)
        report(Loading("checks"))
        with watch(model) as watched:
            verify(model, layers, vocab_size)
        self._adapters = TorchAdapters(watched.targets(), config.max_loras, config.max_lora_rank, device)
        block_size = config.block_size or _BLOCK_SIZES[device.type]
        groups = tuple(KVGroup(block_size, group.window) for group in groups_of(layers.layouts))
        beside = step_memory(model, layers, min(model_len, config.max_num_batched_tokens))
        block_bytes, row_bytes = bytes_of_block(layers.layouts, block_size), bytes_of_row(layers.states)
        interval = state_interval(config.state_interval, row_bytes, block_bytes, block_size) if row_bytes else 0
        free = free_memory(device) - beside - self._adapters.reserved_bytes
        space = StateSpace.of(config, interval, row_bytes, free)
        count = num_blocks(
            config,
            groups,
            model_len,
            block_bytes + space.bytes_beside(block_size),
            free=free,
            beside=space.working_bytes,
            share=_SHARE_OF_FREE_MEMORY[device.type],
        )
        states = space.group(count, block_size)
        load_configured(config.adapters, self._adapters.prepare, self._adapters.install)
        cache = TorchKVCache(layers.attention, count, block_size, device)
        tables = TorchStates(layers.states, states.num_rows + space.guess_rows, device) if states else None
        self._threaded = ThreadedModel(PagedModel(model, cache, tables), self._adapters)
        where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
        info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=model_len,
            kv_groups=groups,
            states=states,
            num_blocks=count,
            guess_states=space.guess_rows,
            eos_token_ids=eos_token_ids(config.model_dir, vocab_size),
            runner=f"torch {NAMES[dtype]}, {device}, {where}",
            numerics=f"{NAMES[dtype]} on {device.type}",
            supports_pooling=model.base_model is not model,
            supports_drafts=True,
            supports_grammars=True,
            supports_processors=True,
            work=count_work(model, layers.layouts, threads),
        )
        super().__init__(self._threaded, info, config.max_num_seqs, config.model_dir)

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        super().close()
        self._threaded.close()
        for name in ("_model", "_threaded", "_table", "_adapters"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()  # modules and what answers for their attention refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
