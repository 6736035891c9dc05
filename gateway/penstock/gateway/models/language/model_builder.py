"""The builder of language models, from settings: engine process, tokenizer, template, parsers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.client.engine import Engine
from penstock.engines.contract.loading import silent
from penstock.engines.contract.messages import StepRecord
from penstock.engines.door.spec import DoorSpec
from penstock.engines.offload.folder import secret_key
from penstock.engines.process.liveness import Liveness, Watched
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.state import Replicated
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import LanguageModelConfig, ModelSettings
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.models.language.adapters import AdapterSet, new_adapter, parse_adapters, parse_directory
from penstock.gateway.models.language.engine_sharing import (
    attached_engine,
    check_handover,
    engine_elsewhere,
    watchdog_config,
)
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.images.reader import ImageReader, image_reader
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import (
    LoadedModel,
    ModelParsers,
    ModelSource,
    TextSettings,
    choose_parsers,
    default_params,
    load_chat_template,
)
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.models.memory.budgeted_engine import BudgetedEngine
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.tokenizers import ChatTemplate, SpecialTextGuard, TemplateNeeds, Tokenizer, TokenizerError

logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class ModelTexts:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    parsers: ModelParsers
    guard: SpecialTextGuard | None
    """None: the text of a special token in a chat is that token."""
    default_params: dict[str, Any]
    images: ImageReader | None
    template_needs: dict[str, TemplateNeeds]
    """Of each of the model's chat templates by its name, where it has needs."""


def text_settings(config: LanguageModelConfig, source: ModelSource) -> TextSettings:
    return TextSettings(
        folder=str(source.folder),
        chat_template=config.chat_template,
        chat_template_content_format=config.chat_template_content_format,
        special_tokens_in_content=config.special_tokens_in_content,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


def read_tokenizer(settings: TextSettings) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer(Path(settings.folder))
    except TokenizerError as error:
        raise ConfigError(f"model: {error}") from None


def read_texts(settings: TextSettings, tokenizer: Tokenizer) -> ModelTexts:
    """The rest, which needs the tokenizer. Raises ConfigError."""
    form = settings.chat_template_content_format
    template = load_chat_template(tokenizer, settings.chat_template, None if form == "auto" else form)
    parsers = choose_parsers(settings.tool_parser, settings.reasoning_parser, template, tokenizer)
    templates = {} if template is None else template.by_name
    guard = None
    if templates and not settings.special_tokens_in_content:
        sources = "\n".join(template.source for template in templates.values())
        guard = tokenizer.special_text_guard(sources, parsers.own_tags)
    needs = {name: one.needs for name, one in templates.items() if one.needs != TemplateNeeds()}
    folder = Path(settings.folder)
    images = image_reader(folder, tokenizer)
    return ModelTexts(tokenizer, template, parsers, guard, default_params(folder), images, needs)


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """Builds models from their settings, with what all models of a server have in common."""

    server: ServerConfig = field(default_factory=ServerConfig)
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    """Of all models together; without one, each has the machine for itself."""
    board: LoadingBoard = field(default_factory=LoadingBoard)
    """Told how far a model is."""
    new_door: Callable[[], DoorSpec] | None = None
    """Where other processes of this server use an engine, unless it has a door already."""

    def build(self, settings: ModelSettings, source: ModelSource, names: Sequence[str] = ()) -> LoadedModel:
        """A model that is ready to be started: `await model.start()`. Raises ConfigError."""
        about_texts = text_settings(settings.model, source)
        tokenizer = read_tokenizer(about_texts)
        names = tuple(names) or settings.model.served_model_name or (source.name,)
        observed: list[ModelMetrics] = []
        built: list[LoadedModel] = []

        def on_step(step: StepRecord) -> None:
            observed[0].step(step)

        engine, adapters = self._engine(settings, source, names, tokenizer, on_step)
        observed.append(
            ModelMetrics(
                names[0],
                stats=lambda: engine.stats,
                ready=lambda: engine.ready,
                asleep=lambda: built[0].sleep.asleep,
                adapters=adapters,
                liveness=_liveness(engine),
                replicas=engine if isinstance(engine, Replicated) else None,
            )
        )
        texts = read_texts(about_texts, tokenizer)
        for template, needs in texts.template_needs.items():
            logger.info(
                "%s: its chat template (%s) gets messages in the form that it needs: %s", names[0], template, needs
            )
        model = LoadedModel(
            names=names,
            root=source.name,
            engine=engine,
            tokenizer=tokenizer,
            chat_template=texts.chat_template,
            parsers=texts.parsers,
            guard=texts.guard,
            images=texts.images,
            metrics=observed[0],
            default_params=texts.default_params,
            texts=about_texts,
            adapters=adapters,
            max_num_seqs=settings.scheduling.max_num_seqs * _engines(settings),
            sleep_idle_seconds=settings.model.sleep_idle_seconds,
            salt_key=_salt_key(settings.cache.kv_offload_dir),
        )
        built.append(model)
        return model

    def _engine(
        self,
        settings: ModelSettings,
        source: ModelSource,
        names: Sequence[str],
        tokenizer: Tokenizer,
        on_step: Callable[[StepRecord], None],
    ) -> tuple[Engine, AdapterSet]:
        """One engine, here or elsewhere, or several that look like one; and the adapters that it has. Raises
        ConfigError."""
        adapters = AdapterSet()
        remote = engine_elsewhere(settings, self.server, source)
        if remote is not None:
            return attached_engine(settings, self.server, *remote, on_step, adapters), adapters
        make = partial(self._one_engine, names, on_step)
        replication = settings.replication
        spec = None
        if replication.replicas:
            loaded = [new_adapter(*adapter) for adapter in parse_adapters(settings.adapters.lora, names).items()]
            interval = self.server.stream_interval_ms / 1e3
            spec = engine_spec(settings, source, tokenizer, loaded, names, publish_interval=interval)
            if spec.scheduler.kv_events is not None and replication.replica_address:
                raise ConfigError("kv-events: engines elsewhere publish theirs where they are started")
            check_handover(settings, spec)
            directory, room = parse_directory(settings.adapters.lora_directory), spec.options.get("max_loras", 0)
            adapters = AdapterSet(loaded, directory=directory, max_loaded=room)
            if replication.replicas == 1 and replication.resume != "on" and not replication.replica_address:
                if self.new_door is not None and spec.door is None:
                    spec = msgspec.structs.replace(spec, door=self.new_door())
                return make(0, spec, 1), adapters
        from penstock.gateway.models.language.replicas import replicated_engine

        return replicated_engine(settings, self.server, source, spec, make, on_step), adapters

    def _one_engine(
        self, names: Sequence[str], on_step: Callable[[StepRecord], None], number: int, spec: EngineSpec, one_of: int
    ) -> BudgetedEngine:
        """Number `number` of a model's. The first one tells the board how far it is."""
        return BudgetedEngine(
            self.budget,
            names[0],
            spec,
            watchdog_config(self.server),
            one_of=one_of,
            log_level=self.server.logging_level,
            crash_folder=self.server.crash_folder,
            on_step=on_step,
            on_loading=silent if number else self.board.reporter(names),
        )


def _engines(settings: ModelSettings) -> int:
    """That share the model's requests."""
    return max(1, settings.replication.replicas + len(settings.replication.replica_address))


def _liveness(engine: Engine) -> Callable[[], Liveness] | None:
    return (lambda: engine.liveness) if isinstance(engine, Watched) else None


def _salt_key(offload_dir: str | None) -> bytes | None:
    """One that later starts have, too: prefixes of tenants are kept like others. None: any."""
    if offload_dir is None:
        return None
    try:
        return secret_key(Path(offload_dir), "salts")
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv-offload-dir: {error}") from None
