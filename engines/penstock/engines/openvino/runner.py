"""`OpenVINORunner`: the model runner on OpenVINO."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.formats.model_files import eos_token_ids, read_json
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.host.cores import usable_cores
from penstock.engines.host.memory import available_memory
from penstock.engines.kit.adapter_slots import load_configured
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, Batch, GroupTables, Ints
from penstock.engines.kit.cache_size import check_model_sizes, max_model_len, num_blocks
from penstock.engines.kit.layer_groups import group_layers
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.openvino.checkpoint import Checkpoint, full_name
from penstock.engines.openvino.config import OpenVINOConfig, WeightsType
from penstock.engines.openvino.decoder import build_decoder
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.device import (
    ThreadPlan,
    activation_type,
    compile_decoder,
    compute_precision,
    kv_cache_type,
    plan_threads,
)
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.huge_pages import collapse_filled_memory
from penstock.engines.openvino.kv_cache import OpenVINOKVCache, block_layout
from penstock.engines.openvino.lora import OpenVINOAdapters, Pairs
from penstock.engines.openvino.lora_graph import Projection
from penstock.engines.openvino.model import BufferedDecoder
from penstock.engines.openvino.weights import Weights, integer_type, open_weights
from penstock.engines.openvino.work import MatrixWork, count_matrices, model_work
from penstock.kvcache import KVGroup

logger = logging.getLogger(__name__)

_COLLAPSE_SECONDS = 3.0
"""May be spent on huge pages at any rate; a model that takes longer to load may take as long again."""

_LEAST_BITS_FOR_INT8 = 5.2
"""GGUF's Q4_K_M has 4.9, its Q5_0 5.5: what has more is not rounded to 4 bits."""

_ROWS_OF_EXPERT = 8
"""Mean number of an expert's rows when the model is loaded: an expert's weights are packed at its first row."""

_SHARE_OF_FREE_MEMORY = 0.5
"""Of what is free once the weights are loaded: the rest is for activations, logits and other processes."""


class OpenVINORunner(StepRunner):
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: OpenVINOConfig, report: Report = silent) -> None:
        started = time.monotonic()
        settings = read_json(config.model_dir / "config.json")
        check_model_sizes(settings)
        spec = parse_config(settings, config.max_model_len)
        model_len = max_model_len(config.max_model_len, spec.max_position_embeddings)
        eos = eos_token_ids(config.model_dir, settings, spec.vocab_size)
        self._checkpoint = Checkpoint(config.model_dir, full_name, parse_scheme(settings))
        config = _with_weights_of(config, self._checkpoint)
        most_tokens = min(model_len, config.max_num_batched_tokens)
        plans = plan_threads(self._checkpoint.num_bytes, usable_cores(), config.threads, most_tokens)
        self._weights = open_weights(config, self._checkpoint, report)
        integers = integer_type(config, self._checkpoint)
        compiled, description, matrices, projections = _compile(config, spec, self._weights, plans, report, integers)
        self._adapters = OpenVINOAdapters(projections, config.max_loras, config.max_lora_rank, matrices.precision)
        groups = group_layers(spec.sliding_windows)
        block_size, block_bytes = block_layout(compiled[0][1], groups)
        by_tokens = [(plan.min_tokens, one) for plan, one in compiled]
        adapters = self._adapters if config.max_loras else None
        model = BufferedDecoder(by_tokens, len(groups), block_size, config.max_num_batched_tokens, adapters)
        # Each compiled model packs its weights at its first tokens: the first request does not wait for that, and the
        # cache is sized by the memory that is left then.
        least = min(most_tokens, _tokens_for_experts(spec))
        warm_up = [max(1, plan.min_tokens, least) for plan in plans]
        model.use_cache(OpenVINOKVCache(compiled[0][1], groups, -(-warm_up[-1] // block_size)))
        report(Loading("warm-up"))
        for num_tokens in warm_up:
            _compute_prompt(model, len(groups), block_size, np.arange(num_tokens) % spec.vocab_size)
        self._weights.release_pages()
        collapse_filled_memory(max(_COLLAPSE_SECONDS, time.monotonic() - started))
        kv_groups = tuple(KVGroup(block_size, group.window) for group in groups)
        free = available_memory() - self._adapters.reserved_bytes
        count = num_blocks(config, kv_groups, model_len, block_bytes, free=free, share=_SHARE_OF_FREE_MEMORY)
        load_configured(config.adapters, self._adapters.prepare, self._adapters.install)
        model.use_cache(OpenVINOKVCache(compiled[0][1], groups, count))
        info = ModelInfo(
            vocab_size=spec.vocab_size,
            max_model_len=model_len,
            kv_groups=kv_groups,
            num_blocks=count,
            eos_token_ids=eos,
            runner=description,
            supports_pooling=True,
            supports_drafts=True,
            supports_grammars=True,
            supports_processors=True,
            work=model_work(matrices, spec, groups, block_bytes / block_size, plans),
        )
        super().__init__(model, info, config.max_num_seqs, config.model_dir)

    def prepare_adapter(self, key: str, folder: Path) -> Pairs:
        return self._adapters.prepare(key, folder)

    def install_adapter(self, key: str, prepared: Pairs) -> None:
        self._adapters.install(key, prepared)

    def unload_adapter(self, key: str) -> None:
        self._adapters.unload(key)

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        super().close()
        # The mapped file goes last: the compiled model may look into it.
        for name in ("_model", "_table", "_adapters", "_weights", "_checkpoint"):
            delattr(self, name)


def _with_weights_of(config: OpenVINOConfig, checkpoint: Checkpoint) -> OpenVINOConfig:
    """With a type of weights that the graph has, where those of the file have none of its own."""
    bits = checkpoint.bits_of_blocks
    if config.weights != "auto" or bits is None:
        return config
    kind: WeightsType = "int4" if bits < _LEAST_BITS_FOR_INT8 else "int8"
    logger.info("the file's weights of %.1f bits on average are quantized again, to %s", bits, kind)
    return replace(config, weights=kind)


def _compile(
    config: OpenVINOConfig,
    spec: DecoderSpec,
    weights: Weights,
    plans: list[ThreadPlan],
    report: Report,
    integers: str | None,
) -> tuple[list[tuple[ThreadPlan, Any]], str, MatrixWork, dict[str, Projection]]:
    """The model compiled for each plan, what it runs with in words, what its matrices cost, and the projections that
    adapters may change. `integers`: see `integer_type`."""
    core = ov.Core()
    precision = compute_precision(core, config)
    kv_type = kv_cache_type(config, precision)
    activations = activation_type(config, precision, integers is not None)  # refused before the weights are read
    model, projections = build_decoder(spec, weights, precision, lora=bool(config.max_loras))
    weights.finish()
    matrices = count_matrices(model, precision, integers or precision, activations)
    report(Loading("compile"))
    chosen = None if integers is None else activations
    compiled = [
        (plan, compile_decoder(core, model, config, precision, kv_type, plan, chosen, bool(spec.experts)))
        for plan in plans
    ]
    threads = " or ".join(str(plan.threads) for plan in plans)
    kept = "as stored" if config.weights == "auto" else str(config.weights)
    if integers is not None:
        kept += f", activations {activations}"
    words = f"openvino {precision}, weights {kept}, kv {kv_type}, {threads} threads"
    return compiled, words, matrices, projections


def _tokens_for_experts(spec: DecoderSpec) -> int:
    """Different ones, that reach nearly every expert."""
    return spec.experts.count * _ROWS_OF_EXPERT // spec.experts.per_token if spec.experts else 0


def _compute_prompt(model: BufferedDecoder, num_groups: int, block_size: int, tokens: Ints) -> None:
    """In the first blocks of the cache."""
    num_tokens = len(tokens)
    end = -(-num_tokens // block_size)
    tables = GroupTables(np.arange(end, dtype=np.int32)[None], np.zeros(1, np.int64), np.array([end]))
    batch = Batch(
        token_ids=tokens.astype(np.int32),
        positions=np.arange(num_tokens),
        begins=np.array([0, num_tokens]),
        computed=np.zeros(1, np.int64),
        scheduled=np.array([num_tokens]),
        groups=(tables,) * num_groups,
        logits_at=np.array([num_tokens - 1]),
        adapter_slots=np.zeros(1, np.int64),
        wants_hidden=False,
    )
    model.prepare(0, batch)
    model.start(0, NO_INTS, NO_TOKENS)
    model.wait(0)
