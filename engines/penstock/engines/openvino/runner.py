"""`OpenVINORunner`: the model runner on OpenVINO."""

from __future__ import annotations

import time

import numpy as np
import openvino as ov

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from penstock.engines.formats.model_files import eos_token_ids, read_json
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.step_sampling import StepSampler
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import build_decoder
from penstock.engines.openvino.device import (
    compile_decoder,
    compute_precision,
    kv_cache_type,
)
from penstock.engines.openvino.families import DecoderSpec, parse_config
from penstock.engines.openvino.huge_pages import collapse_filled_memory
from penstock.engines.openvino.kv_cache import KVCache, block_layout, size_cache
from penstock.engines.openvino.lanes import choose_lane, compile_lanes, plan_lanes
from penstock.engines.openvino.settings import max_model_len
from penstock.engines.openvino.weights import Weights

_COLLAPSE_SECONDS = 3.0
"""May be spent on huge pages at any rate; a model that takes longer to load may take as long again."""


class OpenVINORunner:
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: OpenVINOConfig) -> None:
        started = time.monotonic()
        model_settings = read_json(config.model_dir / "config.json")
        spec = parse_config(model_settings)
        model_len = max_model_len(config, spec.max_position_embeddings)
        eos = eos_token_ids(config.model_dir, model_settings)
        description = self._load(config, spec, most_tokens=min(model_len, config.max_num_batched_tokens))
        block_size, block_bytes = block_layout(self._lanes[0].compiled)
        self._table = RequestTable(config.max_num_seqs, model_len, block_size, eos)
        for lane in self._lanes:
            lane.prepare(self._table, block_size, config.max_num_batched_tokens)
        self._sampler = StepSampler(self._table, spec.vocab_size)
        self._warm_up(block_size)
        collapse_filled_memory(max(_COLLAPSE_SECONDS, time.monotonic() - started))
        num_blocks = size_cache(config, model_len, block_size, block_bytes)
        self._bind_cache(num_blocks)
        self._info = ModelInfo(
            vocab_size=spec.vocab_size,
            max_model_len=model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            eos_token_ids=eos,
            runner=description,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step (`ModelRunner.execute`)."""
        self._table.apply(step)
        self._cache.copy_blocks(step.block_copies)
        lost = {request.id: "this engine has no LoRA adapters" for request in step.new_requests if request.adapter}
        output = ModelRunnerOutput([[] for _ in step.request_ids], failed=lost)
        if not step.request_ids:
            return output
        rows = self._table.rows_of(step.request_ids)
        computed = np.array(step.num_computed_tokens, np.int64)
        scheduled = np.array(step.num_scheduled_tokens, np.int64)
        for part in self._sampler.parts(rows, computed, scheduled):
            wanted = self._sampler.wanted(part)
            lane = choose_lane(self._lanes, int(part.scheduled.sum()))
            lane.inputs.fill(part, wanted)
            self._sampler.take(step.request_ids, part, wanted, lane.infer(), output)
        return output

    def reset(self) -> None:
        self._table.clear()

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        # The mapped file goes last: the compiled model may look into it.
        for name in ("_lanes", "_cache", "_table", "_checkpoint"):
            if hasattr(self, name):
                delattr(self, name)

    def _load(self, config: OpenVINOConfig, spec: DecoderSpec, most_tokens: int) -> str:
        """Compiles the model; returns what it runs with, in words."""
        core = ov.Core()
        precision = compute_precision(core, config)
        kv_type = kv_cache_type(config, precision)
        self._checkpoint = Checkpoint(config.model_dir)
        plans = plan_lanes(self._checkpoint.num_bytes, usable_cores(), config.threads, most_tokens)
        model = build_decoder(spec, Weights(self._checkpoint, config.weights))
        self._lanes = compile_lanes(
            plans, lambda threads: compile_decoder(core, model, config, precision, kv_type, threads)
        )
        threads = " or ".join(str(plan.threads) for plan in plans)
        weights = "as stored" if config.weights == "auto" else config.weights
        return f"openvino {precision}, weights {weights}, kv {kv_type}, {threads} threads"

    def _bind_cache(self, num_blocks: int) -> None:
        self._cache = KVCache(self._lanes[0].compiled, num_blocks)
        for lane in self._lanes:
            self._cache.bind(lane.request)

    def _warm_up(self, block_size: int) -> None:
        """Computes a token or a few in each lane, at which the plugin packs the weights: the first request does not
        wait for that, and the cache is sized by the memory that is left then."""
        blocks = list(range(-(-self._lanes[-1].plan.min_tokens // block_size) or 1))
        self._bind_cache(len(blocks))
        for lane in self._lanes:
            tokens = max(1, lane.plan.min_tokens)
            request = NewRequest(0, [0] * tokens, tokens, blocks, SamplingParams(max_tokens=1, temperature=0.0), 0)
            self.execute(SchedulerOutput([request], [0], [tokens], [0]))
            self.reset()
        self._checkpoint.release_pages()
