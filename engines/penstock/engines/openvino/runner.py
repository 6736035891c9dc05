"""`OpenVINORunner`: the model runner on OpenVINO."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov

from penstock.engines.cores import usable_cores
from penstock.engines.messages import ModelInfo, SamplingParams
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
from penstock.engines.openvino.inputs import Batch, Ints
from penstock.engines.openvino.kv_cache import KVCache, block_layout, size_cache
from penstock.engines.openvino.lanes import choose_lane, compile_lanes, plan_lanes
from penstock.engines.openvino.requests import RequestTable
from penstock.engines.openvino.settings import eos_token_ids, max_model_len, read_json
from penstock.engines.openvino.weights import Weights
from penstock.engines.sampling import Sampler, token_logprobs
from penstock.engines.scheduler.output import ModelRunnerOutput, NewRequest, SchedulerOutput

_SCORED_BYTES = 256 << 20
"""Most logits that prompt logprobs may take at a time; longer prompts are computed in several inferences."""

_COLLAPSE_SECONDS = 3.0
"""May be spent on huge pages at any rate; a model that takes longer to load may take as long again."""

_NOT_FINITE = "the model's logits are not finite"


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
        self._sampler = Sampler(spec.vocab_size)
        self._max_scored = max(1, _SCORED_BYTES // (4 * spec.vocab_size))
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
        output = ModelRunnerOutput([[] for _ in step.request_ids])
        if not step.request_ids:
            return output
        rows = self._table.rows_of(step.request_ids)
        computed = np.array(step.num_computed_tokens, np.int64)
        scheduled = np.array(step.num_scheduled_tokens, np.int64)
        for part, part_computed, part_scheduled in self._parts(rows, computed, scheduled):
            ids = step.request_ids if len(part) == len(rows) else [step.request_ids[i] for i in part]
            lane = choose_lane(self._lanes, int(part_scheduled.sum()))
            batch = lane.inputs.fill(rows[part], part_computed, part_scheduled)
            logits = lane.infer()
            if batch.prompt_positions:
                self._score_prompts(ids, batch, logits[len(batch.sampling) :], output)
            if len(batch.sampling):
                self._sample(ids, part, batch, logits[: len(batch.sampling)], output)
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

    def _parts(self, rows: Ints, computed: Ints, scheduled: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """(indices of requests, computed, scheduled) for each inference of a step.

        That is one, unless prompt logprobs ask for more logits than memory should be spent on: those prompts are then
        computed by themselves, in chunks.
        """
        table, every = self._table, np.arange(len(rows))
        scored = table.wants_prompt_logprobs[rows]
        if not scored.any() or scheduled[scored].sum() <= self._max_scored:
            yield every, computed, scheduled
            return
        others = every[~scored]
        if len(others):
            yield others, computed[others], scheduled[others]
        for i in every[scored]:
            for start in range(0, int(scheduled[i]), self._max_scored):
                count = min(self._max_scored, int(scheduled[i]) - start)
                yield every[i : i + 1], computed[i : i + 1] + start, np.array([count])

    def _sample(self, ids: list[int], part: Ints, batch: Batch, logits: Any, output: ModelRunnerOutput) -> None:
        rows, sampling = batch.rows[batch.sampling], self._table.sampling
        result = self._sampler.sample(logits, [sampling[row] for row in rows.tolist()])
        for n, (i, token_id) in enumerate(zip(batch.sampling.tolist(), result.token_ids.tolist(), strict=True)):
            if token_id < 0 or ids[i] in output.failed:
                output.failed[ids[i]] = _NOT_FINITE
                result.token_ids[n] = -1
            else:
                output.sampled_token_ids[part[i]].append(token_id)
        good = result.token_ids >= 0
        self._table.append(rows[good], result.token_ids[good])
        for n, entry in result.logprobs.items():
            output.logprobs[ids[batch.sampling[n]]] = [entry]

    def _score_prompts(self, ids: list[int], batch: Batch, logits: Any, output: ModelRunnerOutput) -> None:
        table, start = self._table, 0
        for i, first, count in batch.prompt_positions:
            row = int(batch.rows[i])
            scores, start = logits[start : start + count], start + count
            if not np.isfinite(scores.max(axis=1)).all():
                output.failed[ids[i]] = _NOT_FINITE
                continue
            targets = table.tokens[row, first + 1 : first + count + 1].tolist()
            entries = output.prompt_logprobs.setdefault(ids[i], [])
            top = int(table.num_prompt_logprobs[row])
            entries += [token_logprobs(scores[n], target, top) for n, target in enumerate(targets)]
