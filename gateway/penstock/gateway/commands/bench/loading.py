"""From settings to a runner in this process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from penstock.engines.contract.loading import Loading, silent
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.encoder.model_folder import makes_vectors
from penstock.engines.errors import UnsupportedError
from penstock.engines.host.placement import bind
from penstock.engines.registry import RUNNERS, EngineSpec, load_runner
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.hub import fetch_model
from penstock.gateway.models.language.models import ModelSource
from penstock.tokenizers import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that can be loaded."""

    name: str
    source: ModelSource
    tokenizer: Tokenizer
    spec: EngineSpec


class LoadTimes(msgspec.Struct, frozen=True):
    seconds: float
    stages: dict[str, float]
    """By the words that the log has for them; what comes before the first one is in none."""


def find(config: Config) -> Wanted:
    """Raises ConfigError for settings that contradict each other, UnsupportedError for a model or an engine that is not
    driven step by step."""
    model = config.models.model
    source = asyncio.run(fetch_model(model.model, silent, model.revision))
    if makes_vectors(source.folder):
        raise UnsupportedError(f"{source.name} makes vectors; bench measures models that generate text")
    try:
        tokenizer = Tokenizer(source.folder)
    except TokenizerError as error:
        raise ConfigError(f"model: {error}") from None
    spec = engine_spec(config.models, source, tokenizer)
    if spec.runner not in RUNNERS or spec.scheduling == "engine":
        raise UnsupportedError(
            f"the engine {spec.runner} runs under its own scheduler here; bench drives these step by step: "
            f"{', '.join(sorted(RUNNERS))}"
        )
    return Wanted(source.name, source, tokenizer, spec)


def load(target: Wanted) -> tuple[ModelRunner, LoadTimes]:
    stages = _Stages()
    bind(target.spec.placement)
    runner = load_runner(target.spec, stages)
    return runner, stages.end()


@dataclass(slots=True)
class _Stages:
    """A `Report` that notes how long each stage took."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    _stage: str = ""
    _since: float = 0.0

    def __call__(self, loading: Loading | None) -> None:
        if loading is not None and loading.stage != self._stage:
            self._finish_stage(loading.stage)

    def end(self) -> LoadTimes:
        self._finish_stage("")
        return LoadTimes(time.perf_counter() - self.started, self.seconds)

    def _finish_stage(self, following: str) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = following, now
