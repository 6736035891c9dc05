"""Loading of a decoder: from its files to the buffers that it computes in, and the memory of its KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov

from penstock.engines import __version__
from penstock.engines.contract.loading import Loading, Report
from penstock.engines.contract.model_info import ModelWork
from penstock.engines.formats.model_files import eos_token_ids, exported_graph, graph_key, read_json, weights_of
from penstock.engines.formats.model_settings import text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, GroupTables, Ints, StepBatch
from penstock.engines.kit.cache_size import LayerGroup, check_model_sizes, max_model_len, state_interval
from penstock.engines.kit.features import FeatureStore
from penstock.engines.openvino.checkpoint import Checkpoint, full_name
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import FeatureTap
from penstock.engines.openvino.decoder_inputs import ImageInputs
from penstock.engines.openvino.decoder_kinds import build_decoder
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.device import ThreadPlan, compiled, plan_threads, with_large_steps
from penstock.engines.openvino.exported import context_of, read_exported
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.kv_cache import OpenVINOKVCache, block_layout, cache_layout
from penstock.engines.openvino.lora import OpenVINOAdapters, Projection
from penstock.engines.openvino.model import BufferedDecoder
from penstock.engines.openvino.numerics import ModelFacts, Numerics, StoredTypes, Wish
from penstock.engines.openvino.recurrent import StateTables, row_bytes, states_layout
from penstock.engines.openvino.trials import settle
from penstock.engines.openvino.vision import VisionModel
from penstock.engines.openvino.weights import Weights, checkpoint_key, open_weights
from penstock.engines.openvino.work import MatrixWork, count_matrices, model_work

BuildGraph = Callable[[DecoderSpec, Weights, str], tuple[ov.Model, dict[str, Projection]]]
"""As `build_decoder`."""

_STORED: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}

_ROWS_OF_EXPERT = 8
"""Mean number of an expert's rows when the model is loaded: an expert's weights are packed at its first row."""


@dataclass(kw_only=True)
class DecoderGraph(ABC):
    """A decoder before it is compiled, as a `GraphSource`."""

    numerics: Numerics
    vocab_size: int
    groups: list[LayerGroup]
    eos_token_ids: tuple[int, ...] = ()
    model_len: int
    """Positions that it can compute, as far as they are wanted."""
    weight_bytes: int
    kept: str
    """How weights are held, in words."""
    has_experts: bool = False
    is_hybrid: bool = False
    first_tokens: int = 1
    """Different ones, that reach nearly every expert."""
    tap: FeatureTap | None = None
    """What it gives of every token to a draft head."""
    images: ImageInputs | None = None
    """None: it reads text only."""
    feature_width: int = 0
    """Of what a draft head itself is given beside every token; 0: nothing."""
    projections: dict[str, Projection] = field(default_factory=dict)
    """Those that adapters may change, once the graph is made."""

    @abstractmethod
    def make(self) -> ov.Model: ...

    def release_pages(self) -> None:
        pass

    @abstractmethod
    def content(self) -> object:
        """What decides its results, beside number types."""

    def work(self, token_bytes: float, plans: Sequence[ThreadPlan]) -> ModelWork | None:
        """`token_bytes`: as `model_work` takes them. None: it is not counted."""
        return None

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def types(self) -> str:
        """In words."""
        dtype, *rest = self.numerics.words.split(", ")
        return ", ".join([dtype, f"weights {self.kept}", *rest])


@dataclass(kw_only=True)
class BuiltDecoder(DecoderGraph):
    """Its graph is built here, of weights."""

    spec: DecoderSpec
    checkpoint: Checkpoint
    weights: Weights
    build: BuildGraph
    matrices: MatrixWork | None = None

    def make(self) -> ov.Model:
        dtype, numerics = self.numerics.dtype, self.numerics
        graph, self.projections = self.build(self.spec, self.weights, dtype)
        self.weights.finish()
        self.matrices = count_matrices(graph, dtype, numerics.integers or dtype, numerics.activations)
        return graph

    def release_pages(self) -> None:
        self.weights.release_pages()

    def content(self) -> object:
        return checkpoint_key(self.types, self.checkpoint), self.spec, self.tap and self.tap.identity

    def work(self, token_bytes: float, plans: Sequence[ThreadPlan]) -> ModelWork | None:
        assert self.matrices is not None
        return model_work(self.matrices, self.spec, self.groups, token_bytes, plans)


@dataclass(kw_only=True)
class ExportedDecoder(DecoderGraph):
    """Its graph is a file that has the weights. All layers keep all tokens; what a step reads and computes is not
    counted."""

    file: Path
    graph: ov.Model

    def make(self) -> ov.Model:
        return self.graph

    def content(self) -> object:
        return self.types, graph_key(self.file)


@dataclass(slots=True)
class LoadedDecoder:
    """A decoder that has computed its first tokens, with a cache that is just large enough for them."""

    source: DecoderGraph
    """The compiled model may look into its files."""
    compiled: Any
    """The model for the smallest batches; all have the same KV cache."""
    model: BufferedDecoder
    adapters: OpenVINOAdapters
    block_size: int
    block_bytes: int
    """Of one block in all layers of a group, with its features."""
    words: str
    """What it runs with."""
    work: ModelWork | None
    state_interval: int = 0
    """Tokens between checkpoints of recurrent states; 0: it has none."""
    row_bytes: int = 0
    """Of one of those states, in all layers."""

    def use_blocks(self, count: int, num_rows: int = 0) -> None:
        """Its KV cache gets so many, and its tables so many rows of states."""
        source, features = self.source, None
        if source.tap is not None:
            features = FeatureStore(count, self.block_size, source.tap.width, _stored_type(source))
        states = StateTables(self.compiled, num_rows) if num_rows else None
        rows = None if states is None else states.rows
        self.model.use_cache(OpenVINOKVCache(self.compiled, source.groups, count, features, rows), states)

    def cache_identity(self) -> str:
        """`BlockHost.cache_identity`"""
        versions, content = (__version__, ov.__version__), repr(self.source.content())
        layout = cache_layout(self.compiled) + states_layout(self.compiled)
        return repr((versions, content, self.block_size, self.block_bytes, layout))

    def free(self) -> None:
        """It cannot be used afterwards. The mapped file goes last: the compiled model may look into it."""
        for name in ("model", "adapters", "compiled", "source"):
            delattr(self, name)


def open_decoder(
    config: OpenVINOConfig, report: Report, tap: FeatureTap | None = None, vision: VisionModel | None = None
) -> DecoderGraph:
    """`tap`: of the draft head beside it; exported models have none. `vision`: there is an encoder of images. Raises
    UnsupportedError for a model that cannot be run, EngineError for a broken one."""
    graph = exported_graph(config.model_dir)
    if graph is not None:
        return _open_exported(config, graph, report)
    lora, max_len = bool(config.max_loras), config.max_model_len
    return open_built(config, config.model_dir, report, max_len=max_len, lora=lora, tap=tap, vision=vision)


def open_built(
    config: OpenVINOConfig,
    folder: Path,
    report: Report,
    *,
    max_len: int | None = None,
    lora: bool = False,
    tap: FeatureTap | None = None,
    vision: VisionModel | None = None,
    is_draft: bool = False,
) -> BuiltDecoder:
    """A decoder of weights in `folder`; `max_len`: the longest context that is wanted. Raises as `open_decoder`."""
    settings = text_settings(read_json(folder / "config.json"))
    check_model_sizes(settings)
    spec = parse_config(settings, max_len)
    eos = eos_token_ids(folder, spec.vocab_size)
    model_len = max_model_len(max_len, spec.max_position_embeddings)
    checkpoint = Checkpoint(folder, full_name, parse_scheme(settings))
    build = partial(build_decoder, lora=lora, tap=tap, vision=vision)
    source = built_decoder(config, spec, checkpoint, build, report, is_draft=is_draft)
    images = None if vision is None else vision.decoder_inputs(spec.hidden_size)
    return replace(source, eos_token_ids=eos, model_len=model_len, tap=tap, images=images)


def built_decoder(
    config: OpenVINOConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    build: BuildGraph,
    report: Report,
    *,
    is_draft: bool = False,
) -> BuiltDecoder:
    """Raises as `open_weights`."""
    attention = list(spec.attention.values())
    is_capped = any(layer.score_cap for layer in attention)
    facts = ModelFacts(head_size=attention[0].head_dim, is_capped=is_capped, is_draft=is_draft)
    weights, numerics = open_weights(config, checkpoint, facts, report)  # refused before the weights are read
    experts = spec.experts
    return BuiltDecoder(
        numerics=numerics,
        vocab_size=spec.vocab_size,
        groups=spec.groups,
        model_len=spec.max_position_embeddings,
        weight_bytes=checkpoint.num_bytes,
        kept="as stored" if numerics.weights == "auto" else numerics.weights,
        has_experts=experts is not None,
        is_hybrid=spec.is_hybrid,
        first_tokens=experts.count * _ROWS_OF_EXPERT // experts.per_token if experts else 0,
        spec=spec,
        checkpoint=checkpoint,
        weights=weights,
        build=build,
    )


def _open_exported(config: OpenVINOConfig, file: Path, report: Report) -> ExportedDecoder:
    settings = read_json(config.model_dir / "config.json")
    model_len = max_model_len(config.max_model_len, context_of(settings, config))
    report(Loading("weights"))
    exported = read_exported(file)
    facts = ModelFacts(StoredTypes(integers=exported.integers), exported.head_size, is_exported=True)
    return ExportedDecoder(
        numerics=settle(Wish.of(config), facts),
        vocab_size=exported.vocab_size,
        groups=[LayerGroup(0, tuple(range(exported.num_layers)))],
        eos_token_ids=eos_token_ids(config.model_dir, exported.vocab_size),
        model_len=model_len,
        weight_bytes=weights_of(file).stat().st_size,
        kept="as exported" + (f" ({exported.integers})" if exported.integers else ""),
        has_experts=bool(settings.get("num_experts") or settings.get("num_local_experts")),
        is_hybrid=exported.is_hybrid,
        file=file,
        graph=exported.model,
    )


def load_decoder(config: OpenVINOConfig, source: DecoderGraph, report: Report) -> LoadedDecoder:
    most_tokens = min(source.model_len, config.max_num_batched_tokens)
    plans = plan_threads(source.weight_bytes, usable_cores(), config.threads, most_tokens)
    if source.numerics.large_steps:
        plans = with_large_steps(plans, most_tokens)
    with compiled(source, plans, report) as models:
        loaded = _loaded(config, source, plans, models)
        _warm_up(loaded, plans, min(most_tokens, source.first_tokens), report)
    return loaded


def _loaded(config: OpenVINOConfig, source: DecoderGraph, plans: list[ThreadPlan], models: list[Any]) -> LoadedDecoder:
    """Before its first tokens."""
    block_size, block_bytes = block_layout(models[0], source.groups)
    slots, precision = config.max_loras if source.projections else 0, source.numerics.dtype
    adapters = OpenVINOAdapters(source.projections, slots, config.max_lora_rank, precision)
    of_row = row_bytes(models[0])
    interval = state_interval(config.state_interval, of_row, block_bytes, block_size) if of_row else 0
    features = block_size * source.tap.width * _stored_type(source).itemsize if source.tap else 0
    model = BufferedDecoder(
        [(plan.min_tokens, model) for plan, model in zip(plans, models, strict=True)],
        len(source.groups),
        block_size,
        config.max_num_batched_tokens,
        adapters if slots else None,
        source.feature_width,
        interval > 0,
        source.images,
    )
    return LoadedDecoder(
        source=source,
        compiled=models[0],
        model=model,
        adapters=adapters,
        block_size=block_size,
        block_bytes=block_bytes + features,
        words=f"openvino {source.types}, {' or '.join(str(plan.threads) for plan in plans)} threads",
        work=source.work(block_bytes / block_size, plans),
        state_interval=interval,
        row_bytes=of_row,
    )


def _stored_type(source: DecoderGraph) -> np.dtype[Any]:
    """Of features that are kept."""
    return _STORED[source.numerics.dtype]


def _warm_up(loaded: LoadedDecoder, plans: list[ThreadPlan], least: int, report: Report) -> None:
    """Each compiled model packs its weights at its first tokens: the first request does not wait for that, and the
    cache is sized by the memory that is left then."""
    most = [plan.min_tokens - 1 for plan in plans[1:]] + [least]
    numbers = [max(1, plan.min_tokens, min(least, end)) for plan, end in zip(plans, most, strict=True)]
    loaded.use_blocks(-(-numbers[-1] // loaded.block_size), 1 if loaded.state_interval else 0)
    report(Loading("warm-up"))
    for num_tokens in numbers:
        _compute_prompt(loaded, np.arange(num_tokens) % loaded.source.vocab_size)


def _compute_prompt(loaded: LoadedDecoder, tokens: Ints) -> None:
    """In the first blocks of the cache."""
    num_tokens, width, model = len(tokens), loaded.source.feature_width, loaded.model
    groups = (_first_blocks(num_tokens, loaded.block_size),) * len(loaded.source.groups)
    if loaded.state_interval:
        rows = _first_blocks(num_tokens, loaded.block_size)
        groups = (*groups, replace(rows, block_ids=np.zeros_like(rows.block_ids)))
    batch = StepBatch(
        token_ids=tokens.astype(np.int32),
        positions=np.arange(num_tokens),
        begins=np.array([0, num_tokens]),
        computed=np.zeros(1, np.int64),
        scheduled=np.array([num_tokens]),
        groups=groups,
        logits_at=np.array([num_tokens - 1]),
        adapter_slots=np.zeros(1, np.int64),
        wants_hidden=False,
        features=np.zeros((num_tokens, width), np.float32) if width else None,
    )
    model.prepare(0, batch)
    model.start(0, NO_INTS, NO_TOKENS)
    model.wait(0)


def _first_blocks(num_tokens: int, block_size: int) -> GroupTables:
    end = -(-num_tokens // block_size)
    return GroupTables(np.arange(end, dtype=np.int32)[None], np.zeros(1, np.int64), np.array([end]))
