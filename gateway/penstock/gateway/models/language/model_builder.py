"""The builder of language models, from settings: engine process, tokenizer, template, parsers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.language_model import LanguageModelConfig
from penstock.gateway.models.language.adapters import Adapter, AdapterSet, new_adapter, parse_adapters, parse_directory
from penstock.gateway.models.language.engine_sharing import (
    attached_engine,
    check_handover,
    engine_elsewhere,
    watchdog_config,
)
from penstock.gateway.models.language.engine_spec import engine_spec
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
    given = settings.chat_template_content_format
    template = load_chat_template(tokenizer, settings.chat_template, None if given == "auto" else given)
    parsers = choose_parsers(settings.tool_parser, settings.reasoning_parser, template, tokenizer)
    templates = {} if template is None else template.by_name
    guard = None
    if templates and not settings.special_tokens_in_content:
        sources = "\n".join(each.source for each in templates.values())
        guard = tokenizer.special_text_guard(sources, parsers.own_tags)
    needs = {name: each.needs for name, each in templates.items() if each.needs != TemplateNeeds()}
    return ModelTexts(tokenizer, template, parsers, guard, default_params(Path(settings.folder)), needs)


def build_model(
    config: Config,
    source: ModelSource,
    names: Sequence[str] = (),
    budget: MemoryBudget | None = None,
    board: LoadingBoard | None = None,
    new_door: Callable[[], DoorSpec] | None = None,
) -> LoadedModel:
    """A model that is ready to be started: `await model.engine.start()`. Raises ConfigError.

    `budget` is that of all models of a server; None: it has the machine for itself. `board` is told how far it is.
    `new_door`: where other processes of this server use the engine, unless it has a door already.
    """
    about_texts = text_settings(config.model, source)
    tokenizer = read_tokenizer(about_texts)
    names = tuple(names) or public_names(config, source.name)
    observed: list[ModelMetrics] = []
    built: list[LoadedModel] = []

    def on_step(step: StepRecord) -> None:
        observed[0].step(step)

    given = [new_adapter(*each) for each in parse_adapters(config.adapters.lora, names).items()]
    make = partial(_one_engine, config, budget or MemoryBudget(), names, board, on_step)
    engine, adapters = _engine(config, source, names, tokenizer, given, make, on_step, new_door)
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
        logger.info("%s: its chat template (%s) gets messages in the form that it needs: %s", names[0], template, needs)
    model = LoadedModel(
        names=names,
        root=source.name,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=texts.chat_template,
        parsers=texts.parsers,
        guard=texts.guard,
        metrics=observed[0],
        default_params=texts.default_params,
        texts=about_texts,
        adapters=adapters,
        max_num_seqs=config.scheduling.max_num_seqs * _engines(config),
        sleep_idle_seconds=config.model.sleep_idle_seconds,
        salt_key=_salt_key(config.cache.kv_offload_dir),
    )
    built.append(model)
    return model


def _engines(config: Config) -> int:
    """That share the model's requests."""
    return max(1, config.replication.replicas + len(config.replication.replica_address))


def _engine(
    config: Config,
    source: ModelSource,
    names: Sequence[str],
    tokenizer: Tokenizer,
    given: Sequence[Adapter],
    make: Callable[[int, EngineSpec, int], BudgetedEngine],
    on_step: Callable[[StepRecord], None],
    new_door: Callable[[], DoorSpec] | None,
) -> tuple[Engine, AdapterSet]:
    """One engine, here or elsewhere, or several that look like one; and the adapters that it has. `make`: see
    `_one_engine`. Raises ConfigError."""
    adapters = AdapterSet()
    elsewhere = engine_elsewhere(config, source)
    if elsewhere is not None:
        return attached_engine(config, *elsewhere, watchdog_config(config.server), on_step, adapters), adapters
    replication = config.replication
    spec = None
    if replication.replicas:
        spec = engine_spec(config, source, tokenizer, given, names)
        if spec.scheduler.kv_events is not None and replication.replica_address:
            raise ConfigError("kv-events: engines elsewhere publish theirs where they are started")
        check_handover(config, spec)
        directory, room = parse_directory(config.adapters.lora_directory), spec.options.get("max_loras", 0)
        adapters = AdapterSet(given, directory=directory, max_loaded=room)
        if replication.replicas == 1 and replication.resume != "on" and not replication.replica_address:
            if new_door is not None and spec.door is None:
                spec = msgspec.structs.replace(spec, door=new_door())
            return make(0, spec, 1), adapters
    from penstock.gateway.models.language.replicas import replicated_engine

    return replicated_engine(config, source, spec, make, watchdog_config(config.server), on_step), adapters


def _liveness(engine: Engine) -> Callable[[], Liveness] | None:
    return (lambda: engine.liveness) if isinstance(engine, Watched) else None


def _one_engine(
    config: Config,
    budget: MemoryBudget,
    names: Sequence[str],
    board: LoadingBoard | None,
    on_step: Callable[[StepRecord], None],
    number: int,
    spec: EngineSpec,
    one_of: int,
) -> BudgetedEngine:
    """Number `number` of a model's. The first one tells the board how far it is."""
    return BudgetedEngine(
        budget,
        names[0],
        spec,
        watchdog_config(config.server),
        one_of=one_of,
        log_level=config.server.logging_level,
        crash_folder=config.server.crash_folder,
        on_step=on_step,
        on_loading=silent if board is None or number else board.reporter(names),
    )


def _salt_key(offload_dir: str | None) -> bytes | None:
    """One that later starts have, too: prefixes of tenants are kept like others. None: any."""
    if offload_dir is None:
        return None
    try:
        return secret_key(Path(offload_dir), "salts")
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv-offload-dir: {error}") from None


def public_names(config: Config, source_name: str) -> tuple[str, ...]:
    """Of the model that the command names."""
    return config.model.served_model_name or (source_name,)
