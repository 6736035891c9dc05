"""`OpenVINORunner`: the model runner on OpenVINO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from penstock.engines.errors import ContextLengthError, EngineError, UnsupportedError
from penstock.engines.messages import ModelInfo, TokenLogprobs
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import build_decoder
from penstock.engines.openvino.device import compile_decoder, compute_precision, default_threads
from penstock.engines.openvino.families import DecoderSpec, parse_config
from penstock.engines.openvino.inputs import Batch, StepInputs
from penstock.engines.openvino.kv_cache import KVCache, block_layout
from penstock.engines.openvino.memory import available_memory
from penstock.engines.openvino.requests import RequestTable
from penstock.engines.openvino.weights import Weights
from penstock.engines.sampling import sample, token_logprobs
from penstock.engines.scheduler.output import ModelRunnerOutput, SchedulerOutput

_SHARE_OF_FREE_MEMORY = 0.5
"""Of what is free once the weights are loaded: the rest is for activations, logits and the other processes."""


class OpenVINORunner:
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: OpenVINOConfig) -> None:
        settings = _read_json(config.model_dir / "config.json")
        spec = parse_config(settings)
        max_model_len = _max_model_len(config, spec)
        core = ov.Core()
        precision = compute_precision(core, config)
        # The plugin may read constants where they are: the mapping has to live as long as the compiled model.
        self._checkpoint = Checkpoint(config.model_dir)
        weights = Weights(self._checkpoint, config.weights)
        compiled = compile_decoder(core, build_decoder(spec, weights), config, precision)
        self._request = compiled.create_infer_request()
        block_size, block_bytes = block_layout(compiled)
        num_blocks = _num_blocks(config, max_model_len, block_size, block_bytes)
        self._cache = KVCache(compiled, num_blocks)
        self._cache.bind(self._request)
        eos_token_ids = _eos_token_ids(config.model_dir, settings)
        self._table = RequestTable(config.max_num_seqs, max_model_len, block_size, eos_token_ids)
        self._inputs = StepInputs(self._request, self._table, block_size)
        kv = precision if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        threads = config.threads or default_threads()
        self._info = ModelInfo(
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            eos_token_ids=eos_token_ids,
            runner=f"openvino {precision}, weights {config.weights}, kv {kv}, {threads} threads",
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step (`ModelRunner.execute`)."""
        self._table.apply(step)
        self._cache.copy_blocks(step.block_copies)
        if not step.request_ids:
            return ModelRunnerOutput([])
        computed = np.array(step.num_computed_tokens, np.int64)
        scheduled = np.array(step.num_scheduled_tokens, np.int64)
        batch = self._inputs.fill(self._table.rows_of(step.request_ids), computed, scheduled)
        self._request.infer()
        logits = self._request.get_output_tensor(0).data
        output = ModelRunnerOutput([[] for _ in step.request_ids])
        self._sample(step, batch, logits[: len(batch.sampling)], output)
        if batch.prompt_positions:
            self._score_prompts(step, batch, logits[len(batch.sampling) :], output)
        return output

    def reset(self) -> None:
        self._table.clear()

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        self.reset()
        for name in ("_inputs", "_request", "_cache", "_checkpoint", "_table"):
            if hasattr(self, name):
                delattr(self, name)

    def _sample(self, step: SchedulerOutput, batch: Batch, logits: Any, output: ModelRunnerOutput) -> None:
        if not len(batch.sampling):
            return
        rows = batch.rows[batch.sampling]
        sampling = self._table.sampling
        result = sample(logits, [sampling[row] for row in rows.tolist()])
        for i, token_id in zip(batch.sampling.tolist(), result.token_ids.tolist(), strict=True):
            if token_id >= 0:
                output.sampled_token_ids[i].append(token_id)
            else:
                output.failed[step.request_ids[i]] = "the model's logits are not finite"
        good = result.token_ids >= 0
        self._table.append(rows[good], result.token_ids[good])
        for n, entry in result.logprobs.items():
            output.logprobs[step.request_ids[batch.sampling[n]]] = [entry]

    def _score_prompts(self, step: SchedulerOutput, batch: Batch, logits: Any, output: ModelRunnerOutput) -> None:
        table, start = self._table, 0
        for i, first, count in batch.prompt_positions:
            row = int(batch.rows[i])
            targets = table.tokens[row, first + 1 : first + count + 1].tolist()
            params = table.params[row]
            top = params.prompt_logprobs or 0 if params else 0
            entries: list[TokenLogprobs] = [
                token_logprobs(logits[start + n], target, top) for n, target in enumerate(targets)
            ]
            output.prompt_logprobs[step.request_ids[i]] = entries
            start += count


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except OSError as e:
        raise EngineError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise EngineError(f"{path} is not JSON: {e}") from e
    if not isinstance(settings, dict):
        raise EngineError(f"{path} does not hold an object")
    return settings


def _max_model_len(config: OpenVINOConfig, spec: DecoderSpec) -> int:
    limit = spec.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ContextLengthError(
            f"max_model_len={config.max_model_len} is above the model's {limit}", param="max_model_len"
        )
    return config.max_model_len


def _num_blocks(config: OpenVINOConfig, max_model_len: int, block_size: int, block_bytes: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        count = config.kv_cache_memory // block_bytes
    else:
        usable = config.max_num_seqs * -(-max_model_len // block_size)
        count = min(usable, int(available_memory() * _SHARE_OF_FREE_MEMORY) // block_bytes)
    if count < 1:
        raise UnsupportedError(f"the KV cache does not hold one block of {block_bytes} bytes", param="kv_cache_memory")
    return count


def _eos_token_ids(model_dir: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers."""
    path = model_dir / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = settings.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
