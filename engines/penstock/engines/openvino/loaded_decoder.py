"""A decoder from its files to the buffers that it computes in, and the memory of its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov

from penstock.engines import __version__
from penstock.engines.contract.loading import Loading, Report
from penstock.engines.contract.model_info import ModelWork
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.exported_graph import exported_graph, graph_key, weights_of
from penstock.engines.formats.model_files import eos_token_ids, read_json
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.text_part import text_settings
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, Batch, GroupTables, Ints
from penstock.engines.kit.cache_size import LayerGroup, check_model_sizes, group_layers, max_model_len
from penstock.engines.kit.features import FeatureStore
from penstock.engines.openvino.checkpoint import Checkpoint, full_name
from penstock.engines.openvino.config import QUANTIZED, OpenVINOConfig, WeightsType
from penstock.engines.openvino.decoder import FeatureTap, build_decoder
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.device import ThreadPlan, compile_decoder, plan_threads, with_large_steps
from penstock.engines.openvino.exported import context_of, read_exported
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.kv_cache import OpenVINOKVCache, block_layout, cache_layout
from penstock.engines.openvino.loading_memory import mapped_pages_released
from penstock.engines.openvino.lora import OpenVINOAdapters
from penstock.engines.openvino.lora_graph import Projection
from penstock.engines.openvino.model import BufferedDecoder
from penstock.engines.openvino.numerics import ModelFacts, Numerics, Wish
from penstock.engines.openvino.trials import settle
from penstock.engines.openvino.weights import Weights, checkpoint_key, integer_type, open_weights
from penstock.engines.openvino.work import MatrixWork, count_matrices, model_work

logger = logging.getLogger(__name__)

BuildGraph = Callable[[DecoderSpec, Weights, str], tuple[ov.Model, dict[str, Projection]]]
"""As `build_decoder`."""

_STORED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}

_LEAST_BITS_FOR_INT8 = 5.2
"""GGUF's Q4_K_M has 4.9, its Q5_0 5.5: what has more is not rounded to 4 bits."""

_ROWS_OF_EXPERT = 8
"""Mean number of an expert's rows when the model is loaded: an expert's weights are packed at its first row."""


@dataclass(slots=True)
class LoadedDecoder:
    """A decoder that has computed its first tokens, with a cache that is just large enough for them."""

    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    model_len: int
    """Positions that it can compute, as far as they are wanted."""
    sources: list[Any]
    """What the compiled model may look into: mapped files."""
    compiled: Any
    """The model for the smallest batches; all have the same KV cache."""
    groups: list[LayerGroup]
    block_size: int
    block_bytes: int
    """Of one block in all layers of a group, with its features."""
    tap: FeatureTap | None
    """What it gives of every token."""
    stored: np.dtype[Any]
    """Of features that are kept."""
    model: BufferedDecoder
    adapters: OpenVINOAdapters
    content_key: Callable[[], str]
    """Of the weights, the graph, and the types of both and of the cache."""
    numerics: Numerics
    words: str
    """What it runs with."""
    work: ModelWork | None

    def use_blocks(self, count: int) -> None:
        """Its KV cache gets so many."""
        features = FeatureStore(count, self.block_size, self.tap.width, self.stored) if self.tap else None
        self.model.use_cache(OpenVINOKVCache(self.compiled, self.groups, count, features))

    def cache_identity(self) -> str:
        """`BlockHost.cache_identity`"""
        versions = (__version__, ov.__version__)
        return repr((versions, self.content_key(), self.block_size, self.block_bytes, cache_layout(self.compiled)))

    def free(self) -> None:
        """It cannot be used afterwards. The mapped file goes last: the compiled model may look into it."""
        for name in ("model", "adapters", "compiled", "content_key", "sources"):
            delattr(self, name)


@dataclass(frozen=True)
class DecoderFiles:
    """What is known of a decoder before its weights are read."""

    spec: DecoderSpec
    eos_token_ids: tuple[int, ...]
    model_len: int
    """As `LoadedDecoder.model_len`."""
    checkpoint: Checkpoint
    weights: Weights
    build: BuildGraph
    tap: FeatureTap | None = None
    """As `LoadedDecoder.tap`."""
    given: int = 0
    """Width of the features that it is given beside every token; 0: none."""


def load_decoder(config: OpenVINOConfig, report: Report, tap: FeatureTap | None = None) -> LoadedDecoder:
    """`tap`: of the draft head beside it; exported models have none. Raises UnsupportedError for a model that cannot be
    run, EngineError for a broken one."""
    graph = exported_graph(config.model_dir)
    return _load_built(config, report, tap) if graph is None else _load_exported(config, graph, report)


def _load_built(config: OpenVINOConfig, report: Report, tap: FeatureTap | None) -> LoadedDecoder:
    """Of weights, for which the graph is built here."""
    settings = text_settings(read_json(config.model_dir / "config.json"))
    check_model_sizes(settings)
    spec = parse_config(settings, config.max_model_len)
    eos = eos_token_ids(config.model_dir, spec.vocab_size)
    model_len = max_model_len(config.max_model_len, spec.max_position_embeddings)
    checkpoint = Checkpoint(config.model_dir, full_name, parse_scheme(settings))
    build = partial(build_decoder, lora=bool(config.max_loras), tap=tap)
    config = with_weights_of(config, checkpoint)
    weights = open_weights(config, checkpoint, report)
    return load_files(config, DecoderFiles(spec, eos, model_len, checkpoint, weights, build, tap), report)


def load_files(config: OpenVINOConfig, files: DecoderFiles, report: Report) -> LoadedDecoder:
    spec, checkpoint, weights = files.spec, files.checkpoint, files.weights
    most_tokens = min(files.model_len, config.max_num_batched_tokens)
    plans = plan_threads(checkpoint.num_bytes, usable_cores(), config.threads, most_tokens)
    with mapped_pages_released(weights.release_pages):
        integers = integer_type(config, checkpoint)
        numerics = _numerics(config, files, integers)  # refused before the weights are read
        if numerics.large_steps:
            plans = with_large_steps(plans, most_tokens)
        compiled, matrices, projections = _compile(files, plans, report, numerics, integers)
        kept = "as stored" if config.weights == "auto" else str(config.weights)
        types = _types(numerics, kept)
        groups = group_layers(spec.sliding_windows)
        loaded = _loaded(
            config,
            compiled,
            groups,
            OpenVINOAdapters(projections, config.max_loras, config.max_lora_rank, numerics.dtype),
            numerics,
            vocab_size=spec.vocab_size,
            eos=files.eos_token_ids,
            model_len=files.model_len,
            sources=[weights, checkpoint],
            content_key=lambda: repr((checkpoint_key(types, checkpoint), spec, files.tap and files.tap.identity)),
            types=types,
            tap=files.tap,
            given=files.given,
        )
        cache_bytes = block_layout(compiled[0][1], groups)[1] / loaded.block_size
        loaded.work = model_work(matrices, spec, groups, cache_bytes, plans)
        _warm_up(loaded, plans, min(most_tokens, _tokens_for_experts(spec)), report, files.given)
    return loaded


def _load_exported(config: OpenVINOConfig, graph: Path, report: Report) -> LoadedDecoder:
    """Of a graph that has its weights. All layers keep all tokens; what a step reads and computes is not counted."""
    settings = read_json(config.model_dir / "config.json")
    model_len = max_model_len(config.max_model_len, context_of(settings, config))
    core = ov.Core()
    if config.activations == "mixed":
        raise UnsupportedError(
            "activations=mixed is not for models that OpenVINO's tools exported", param="activations"
        )
    report(Loading("weights"))
    exported = read_exported(core, graph)
    facts = ModelFacts(integers=exported.integers is not None, head_size=exported.head_size, is_exported=True)
    numerics = settle(Wish.of(config), facts)
    mixture = bool(settings.get("num_experts") or settings.get("num_local_experts"))
    eos = eos_token_ids(config.model_dir, exported.vocab_size)
    most_tokens = min(model_len, config.max_num_batched_tokens)
    plans = plan_threads(weights_of(graph).stat().st_size, usable_cores(), config.threads, most_tokens)
    report(Loading("compile"))
    compiled = [(plan, compile_decoder(core, exported.model, numerics, plan, mixture)) for plan in plans]
    types = _types(numerics, "as exported" + (f" ({exported.integers})" if exported.integers else ""))
    loaded = _loaded(
        config,
        compiled,
        [LayerGroup(0, tuple(range(exported.num_layers)))],
        OpenVINOAdapters({}, 0, config.max_lora_rank, numerics.dtype),
        numerics,
        vocab_size=exported.vocab_size,
        eos=eos,
        model_len=model_len,
        sources=[exported.model],
        content_key=lambda: repr((types, graph_key(graph))),
        types=types,
    )
    _warm_up(loaded, plans, 1, report)
    return loaded


def _loaded(
    config: OpenVINOConfig,
    compiled: list[tuple[ThreadPlan, Any]],
    groups: list[LayerGroup],
    adapters: OpenVINOAdapters,
    numerics: Numerics,
    *,
    vocab_size: int,
    eos: tuple[int, ...],
    model_len: int,
    sources: list[Any],
    content_key: Callable[[], str],
    types: str,
    tap: FeatureTap | None = None,
    given: int = 0,
) -> LoadedDecoder:
    """Before its first tokens."""
    block_size, block_bytes = block_layout(compiled[0][1], groups)
    by_tokens = [(plan.min_tokens, one) for plan, one in compiled]
    threads = " or ".join(str(plan.threads) for plan, _ in compiled)
    stored = np.dtype(_STORED[numerics.dtype])
    return LoadedDecoder(
        vocab_size=vocab_size,
        num_layers=sum(len(group.layers) for group in groups),
        eos_token_ids=eos,
        model_len=model_len,
        sources=sources,
        compiled=compiled[0][1],
        groups=groups,
        block_size=block_size,
        block_bytes=block_bytes + (block_size * tap.width * stored.itemsize if tap else 0),
        tap=tap,
        stored=stored,
        model=BufferedDecoder(
            by_tokens,
            len(groups),
            block_size,
            config.max_num_batched_tokens,
            adapters if config.max_loras else None,
            given,
        ),
        adapters=adapters,
        content_key=content_key,
        numerics=numerics,
        words=f"openvino {types}, {threads} threads",
        work=None,
    )


def _warm_up(loaded: LoadedDecoder, plans: list[ThreadPlan], least: int, report: Report, given: int = 0) -> None:
    """Each compiled model packs its weights at its first tokens: the first request does not wait for that, and the
    cache is sized by the memory that is left then."""
    most = [plan.min_tokens - 1 for plan in plans[1:]] + [least]
    numbers = [max(1, plan.min_tokens, min(least, end)) for plan, end in zip(plans, most, strict=True)]
    loaded.use_blocks(-(-numbers[-1] // loaded.block_size))
    report(Loading("warm-up"))
    for num_tokens in numbers:
        tokens = np.arange(num_tokens) % loaded.vocab_size
        _compute_prompt(loaded.model, len(loaded.groups), loaded.block_size, tokens, given)


def with_weights_of(config: OpenVINOConfig, checkpoint: Checkpoint) -> OpenVINOConfig:
    """With a type of weights that the graph has, where those of the file have none of its own."""
    bits = checkpoint.bits_of_blocks
    if config.weights != "auto" or bits is None:
        return config
    kind: WeightsType = "int4" if bits < _LEAST_BITS_FOR_INT8 else "int8"
    logger.info("the file's weights of %.1f bits on average are quantized again, to %s", bits, kind)
    return replace(config, weights=kind)


def _numerics(config: OpenVINOConfig, files: DecoderFiles, integers: str | None) -> Numerics:
    """`integers`: see `integer_type`."""
    facts = ModelFacts(
        integers=integers is not None,
        all_integers=config.weights in QUANTIZED and not files.checkpoint.has_mxfp4,
        head_size=files.spec.head_dim,
        is_capped=bool(files.spec.score_cap),
    )
    return settle(Wish.of(config), facts)


def _types(numerics: Numerics, kept: str) -> str:
    """In words; `kept`: how weights are."""
    dtype, *others = numerics.words.split(", ")
    return ", ".join([dtype, f"weights {kept}", *others])


def _compile(
    files: DecoderFiles, plans: list[ThreadPlan], report: Report, numerics: Numerics, integers: str | None
) -> tuple[list[tuple[ThreadPlan, Any]], MatrixWork, dict[str, Projection]]:
    """The model compiled for each plan, what its matrices cost, and the projections that adapters may change.
    `integers`: see `integer_type`."""
    core = ov.Core()
    model, projections = files.build(files.spec, files.weights, numerics.dtype)
    files.weights.finish()
    matrices = count_matrices(model, numerics.dtype, integers or numerics.dtype, numerics.activations)
    report(Loading("compile"))
    experts = bool(files.spec.experts)
    return [(plan, compile_decoder(core, model, numerics, plan, experts)) for plan in plans], matrices, projections


def _tokens_for_experts(spec: DecoderSpec) -> int:
    """Different ones, that reach nearly every expert."""
    return spec.experts.count * _ROWS_OF_EXPERT // spec.experts.per_token if spec.experts else 0


def _compute_prompt(model: BufferedDecoder, num_groups: int, block_size: int, tokens: Ints, given: int) -> None:
    """In the first blocks of the cache. `given`: width of the features beside the tokens."""
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
        features=np.zeros((num_tokens, given), np.float32) if given else None,
    )
    model.prepare(0, batch)
    model.start(0, NO_INTS, NO_TOKENS)
    model.wait(0)
