"""The builder of pooling models: from a model's folder to a PoolingModel that is ready to be started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.engines.client.engine import Engine
from penstock.engines.contract.loading import Report
from penstock.engines.contract.messages import AddRequest, PoolingParams, RequestOutput
from penstock.engines.encoder.engine import EncoderEngine, TextQueue
from penstock.engines.encoder.model_folder import SentenceRecipe, is_encoder_folder, outline_of, read_recipe
from penstock.engines.encoder.text import Encoder, EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.model_files import read_json
from penstock.engines.host.failure_text import as_load_error
from penstock.gateway.configuration.config import ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import DoorConfig, ModelSettings
from penstock.gateway.models.language.engine_spec import choose_engine
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import ModelSource
from penstock.gateway.models.pooling.metrics import EncoderMetrics
from penstock.gateway.models.pooling.model import Head, PoolingModel, read_head
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tokenizer, TokenizerError

_TOGETHER = 128
"""Texts of a call that are with the engine at one time: more would fill its queue."""


class EncoderSource:
    failed = False

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine

    @property
    def info(self) -> EncoderInfo:
        return self._engine.info

    @property
    def ready(self) -> bool:
        return self._engine.ready

    async def start(self) -> None:
        await self._engine.start()

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        return await self._engine.encode(texts)

    async def stop(self) -> None:
        await self._engine.stop()


class DecoderSource:
    """The last token's hidden state of a language model, computed in the steps of its scheduler."""

    def __init__(self, engine: Engine, size: int, max_tokens: int | None) -> None:
        """`size` of a vector; `max_tokens`: as sentence-transformers' files say."""
        self._engine = engine
        self._size = size
        self._max_tokens = max_tokens

    @property
    def info(self) -> EncoderInfo:
        info = self._engine.info
        return EncoderInfo(
            max_tokens=min(self._max_tokens or info.context_length, info.context_length),
            vocab_size=info.vocab_size,
            output_size=self._size,
            runner=info.runner,
        )

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def failed(self) -> bool:
        return self._engine.failed

    async def start(self) -> None:
        await self._engine.start()
        if not self._engine.info.supports_pooling:
            raise UnsupportedError(f"the engine of this model gives no vectors: {self._engine.info.runner}")

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        rows: list[list[float]] = []
        for begin in range(0, len(texts), _TOGETHER):
            rows += await self._some(texts[begin : begin + _TOGETHER], context)
        return np.array(rows, np.float32)

    async def _some(self, texts: Sequence[TokenizedText], context: RequestContext) -> list[list[float]]:
        adds = [self._add(text, context) for text in texts]
        vectors: dict[int, list[float]] = {}
        async with self._engine.submit(adds) as stream:
            async for outputs in stream:
                vectors |= {output.id: _vector(output) for output in outputs}
        return [vectors[add.ids[0]] for add in adds]

    def _add(self, text: TokenizedText, context: RequestContext) -> AddRequest:
        return AddRequest(
            ids=self._engine.new_ids(1),
            prompt_token_ids=list(text.ids),
            params=PoolingParams(normalize=False),
            arrival_time=time.monotonic(),
            deadline=context.deadline,
            priority=context.principal.priority,
            background=context.background,
            tenant=context.tenant,
            cache_salt=context.tenant,  # tenants share no cached prefixes, and no caller gives salts here
        )

    async def stop(self) -> None:
        await self._engine.stop()


def _vector(output: RequestOutput) -> list[float]:
    """Raises the error that ended the request."""
    if output.error is not None:
        raise output.error.raised()
    if output.pooled is None:
        raise EngineError("The engine ended a request without its vector.")
    return output.pooled


def build_pooling_model(
    config: ModelSettings, source: ModelSource, names: tuple[str, ...], builder: ModelBuilder, batch_tokens: int
) -> PoolingModel:
    """`batch_tokens`: see `EmbeddingsConfig`. Raises ConfigError."""
    if config.model.speculative_model is not None or config.scheduling.speculative == "mtp":
        setting = "speculative" if config.model.speculative_model is None else "speculative-model"
        raise ConfigError(f"{setting}: this model gives embeddings or scores, and has no next tokens to guess")
    try:
        settings = read_json(source.folder / "config.json")
        recipe = read_recipe(source.folder)
        if not is_encoder_folder(source.folder, settings):
            return _decoder(config, source, names, settings, recipe, builder)
        tokenizer = Tokenizer(source.folder)
        queue = TextQueue(batch_tokens, config.scheduling.max_queued_requests, config.scheduling.max_queued_tokens)
        report = builder.board.reporter(names)
        return _encoder(config, source, names, settings, recipe, tokenizer, queue, report)
    except (PenstockError, TokenizerError) as error:
        raise ConfigError(f"model: {error}") from None


def _encoder(
    config: ModelSettings,
    source: ModelSource,
    names: tuple[str, ...],
    settings: Mapping[str, Any],
    recipe: SentenceRecipe,
    tokenizer: Tokenizer,
    queue: TextQueue,
    report: Report,
) -> PoolingModel:
    _check_encoder_settings(config)
    outline = outline_of(source.folder, settings)
    model = config.model
    if outline.graph_file is not None and model.weights != "auto":
        raise ConfigError(f"weights: {outline.graph_file.name} is computed with the weights that it has")

    def load(report: Report) -> Encoder:
        from penstock.engines.encoder.model import EncoderModel  # loads OpenVINO
        from penstock.engines.openvino.config import OpenVINOConfig

        options = OpenVINOConfig(
            model_dir=source.folder,
            dtype=model.dtype,
            weights=model.weights,
            activations=model.activations,
            weights_cache=model.weights_cache,
            threads=model.threads,
            max_model_len=model.max_model_len,
        )
        try:
            return EncoderModel(options, recipe, report)
        except Exception as error:
            settings = {"dtype": model.dtype, "weights": model.weights, "activations": model.activations}
            raise as_load_error(error, {"engine": "openvino", **settings}) from error

    engine = EncoderEngine(load, queue, report)
    head: Head | None = None
    if outline.num_labels is not None:
        head = read_head(settings, outline.num_labels)
        recipe = replace(recipe, normalize=False)
    return PoolingModel(
        names=names,
        root=source.name,
        folder=str(source.folder),
        source=EncoderSource(engine),
        tokenizer=tokenizer,
        recipe=recipe,
        head=head,
        dimensions=_matryoshka(settings),
        metrics=EncoderMetrics(names[0], engine),
    )


def _decoder(
    config: ModelSettings,
    source: ModelSource,
    names: tuple[str, ...],
    settings: Mapping[str, Any],
    recipe: SentenceRecipe,
    builder: ModelBuilder,
) -> PoolingModel:
    if recipe.pooling != ("lasttoken",) or recipe.dense:
        raise UnsupportedError(
            f"of {settings.get('architectures')} embeddings are the last token's; this model has the pooling "
            f"{', '.join(recipe.pooling) or 'none'}{' and dense layers' if recipe.dense else ''}"
        )
    if config.model.engine == "auto" and choose_engine(source.folder) == "vllm":
        config = overlay(config, {"engine": "torch"})  # which gives vectors, and comes with vLLM
    model = replace(builder, new_door=None).build(config, source, names)  # fronts pass its requests on
    return PoolingModel(
        names=names,
        root=source.name,
        folder=str(source.folder),
        source=DecoderSource(model.engine, int(settings["hidden_size"]), recipe.max_tokens),
        tokenizer=model.tokenizer,
        recipe=recipe,
        head=None,
        dimensions=_matryoshka(settings),
        metrics=model.metrics,
    )


def _check_encoder_settings(config: ModelSettings) -> None:
    """Raises ConfigError for a setting that would change nothing."""
    model = config.model
    if model.engine not in ("auto", "openvino"):
        raise ConfigError(f"engine: encoders run on openvino, not on {model.engine}")
    if model.device not in ("auto", "cpu"):
        raise ConfigError(f"device: encoders run on cpu, not on {model.device}")
    for name in ("cpus", "numa_nodes"):
        if getattr(model, name) is not None:
            raise ConfigError(
                f"{name.replace('_', '-')}: encoders run in the server's own process, which taskset and numactl bind"
            )
    if config.replication.replicas > 1:
        raise ConfigError("replicas: encoders run in the server's own process")
    if config.adapters.lora or config.adapters.lora_directory:
        raise ConfigError("lora: encoders have no adapters")
    if config.door != DoorConfig():
        raise ConfigError("engine-door, engine-address: encoders run in the server's own process, which has no door")
    if model.chat_template is not None:
        raise ConfigError("chat-template: this model gives embeddings or scores and has no chats")


def _matryoshka(settings: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = settings.get("matryoshka_dimensions")
    return tuple(size for size in sizes if isinstance(size, int)) if isinstance(sizes, list) else ()
