"""`penstock check`: what becomes of the models of a repository, without loading them. Blocks."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from penstock.classic.base import InferModel
from penstock.classic.batching.rate_limiter import has_rate_limits
from penstock.classic.ensemble.plan import Step, is_ensemble, make_plan
from penstock.classic.ensemble.wiring import wire
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, PenstockError
from penstock.gateway.configuration.config import LISTS, SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.flags import add_sections
from penstock.gateway.models.repository.config_fields import FIELDS, Fate, field_lines, set_paths
from penstock.gateway.models.repository.config_file import config_path
from penstock.gateway.models.repository.layout import available_versions, select_versions
from penstock.gateway.models.repository.listing import RepositoryListing
from penstock.gateway.models.repository.loading import Loaders, plan_model, version_config
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import Repository

Result = Literal["works", "works differently", "refused"]


@dataclass(frozen=True, slots=True)
class Note:
    where: str
    """`model/config.pbtxt:12`, or without a line, or the model's name."""
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    model: str
    result: Result
    notes: Sequence[Note] = ()
    """Why it is refused, or what is different."""


@dataclass(frozen=True, slots=True)
class _Described:
    """As much of an InferModel as an ensemble's wiring looks at."""

    name: str
    config: ModelConfig
    signature: ModelSignature
    takes_infer: bool


@dataclass(slots=True)
class _Model:
    name: str
    file: str = ""
    """As in a note; empty: it has no configuration file."""
    lines: Mapping[str, int] = field(default_factory=dict)
    config: ModelConfig | None = None
    """Of the newest version that would serve."""
    versions: Sequence[int] = ()
    refused: Note | None = None

    def note(self, text: str, path: str | None = None) -> Note:
        line = self.lines.get(path or "")
        return Note(f"{self.file or self.name}:{line}" if line else self.file or self.name, text)

    def refuse(self, error: PenstockError | ValueError) -> None:
        if isinstance(error, PenstockError):
            self.refused = self.note(error.message, error.param)
        else:
            self.refused = self.note(str(error))


class RepositoryCheck:
    """`backends` gives what completes the configurations of a backend, and raises ValueError for unknown ones.
    `has_cache`: the server would have a response cache. `limits_rates`: its rate limiter would be on."""

    def __init__(
        self,
        settings: RepositorySettings,
        backends: Loaders,
        *,
        has_cache: bool = False,
        limits_rates: bool = False,
        beside: Sequence[ModelConfig] = (),
    ) -> None:
        """`beside`: models of the server that belong to no repository, of which ensembles may be made."""
        self._beside = {config.name: _Model(config.name, config=config, versions=(1,)) for config in beside}
        self._settings = settings
        self._backends = backends
        self._has_cache = has_cache
        self._limits_rates = limits_rates

    def verdicts(self, repositories: Sequence[Repository]) -> list[Verdict]:
        """One for each model, by name. Raises EngineError for a repository that cannot be read."""
        listing = RepositoryListing(repositories)
        listing.refresh()
        models = {name: self._described(listing, name) for name in sorted(listing.names)}
        for model in models.values():
            _check_ensemble(model, self._beside | models, ())
        return [self._verdict(model) for model in models.values()]

    def _described(self, listing: RepositoryListing, name: str) -> _Model:
        model = _Model(name)
        try:
            local = listing.find(name).fetch(name)
            try:
                self._describe(model, local.folder)
            finally:
                local.close()
        except (PenstockError, ValueError) as error:
            model.refuse(error)
        return model

    def _describe(self, model: _Model, folder: Path) -> None:
        path = config_path(folder, self._settings.config_name)
        if path is not None:
            model.file = f"{model.name}/{path.relative_to(folder).as_posix()}"
            model.lines = field_lines(path.read_bytes().decode(errors="replace"))
        plan = plan_model(self._settings, model.name, folder)
        model.versions = select_versions(plan.config.version_policy, available_versions(folder), model.name)
        backend = None if is_ensemble(plan.config) else self._backends(plan.config.backend, folder)
        for version in model.versions:
            model.config = version_config(self._settings, plan, version, backend)

    def _verdict(self, model: _Model) -> Verdict:
        if model.refused is not None or model.config is None:
            return Verdict(model.name, "refused", [model.refused or model.note("there is no version to serve")])
        notes = list(self._differences(model, model.config))
        return Verdict(model.name, "works differently" if notes else "works", notes)

    def _differences(self, model: _Model, config: ModelConfig) -> Iterator[Note]:
        for path in sorted(set(set_paths(config))):
            if FIELDS[path].fate is Fate.NO_EFFECT and path in model.lines:
                yield model.note(f"{path} has no effect", path)
        if config.response_cache.enable and not self._has_cache:
            text = "every request is computed: the server has no response cache (--cache-config)"
            yield model.note(text, "response_cache.enable")
        if has_rate_limits(config) and not self._limits_rates:
            path = "instance_group.rate_limiter"
            yield model.note(f"{path} has no effect: the server has the rate limiter off (--rate-limit)", path)


def _check_ensemble(model: _Model, models: Mapping[str, _Model], above: tuple[str, ...]) -> None:
    """Its graph, the models that it is made of, and whether they fit together."""
    if model.refused is not None or model.config is None or not is_ensemble(model.config):
        return
    try:
        if model.name in above:
            path = " -> ".join((*above[above.index(model.name) :], model.name))
            raise InvalidRequestError(f"circular dependency between ensembles: {path}")
        plan = make_plan(model.config)
        for name in sorted(plan.models):
            if name in models:
                _check_ensemble(models[name], models, (*above, model.name))
        if model.refused is None:  # it is not made of itself
            wire(plan, model.config, lambda step: _step_model(step, models))
    except InvalidRequestError as error:
        model.refused = model.note(error.message, "ensemble_scheduling")


def _step_model(step: Step, models: Mapping[str, _Model]) -> InferModel:
    model = models.get(step.model)
    if model is None or model.refused is not None or model.config is None:
        raise ModelNotFoundError(f"model '{step.model}' would not serve")
    if step.version != -1 and step.version not in model.versions:
        raise ModelNotFoundError(f"model '{step.model}' would not serve version {step.version}")
    signature = ModelSignature(model.config)
    return cast(InferModel, _Described(model.name, model.config, signature, not signature.decoupled))


CheckModels = Callable[[Config, int | None], "Sequence[Verdict]"]
"""Of a server with these settings, on a machine with so many GPUs (None: those that are there). Raises ConfigError,
PenstockError."""

_RESULTS: tuple[Result, ...] = ("works", "works differently", "refused")

_SETTINGS = (
    *("repository_links", "model_config_name", "disable_auto_complete_config", "backend_directory", "backend_config"),
    *("cache_config", "response_cache_byte_size", "rate_limit", "rate_limit_resource", "embedding_model"),
)


def add_check_command(commands: Any, formatter: Any, check: CheckModels) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser(
        "check",
        help="report which models of a repository would load",
        description="Reads the configurations of a Triton model repository, and what their backends complete of them, "
        "without loading a model. Ends with 1 if a model would be refused, with 2 if the repository cannot be read.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.add_argument("model_repository", nargs="+", metavar="REPO", help="folder, s3://, gs:// or as:// location")
    parser.add_argument("--gpus", type=int, metavar="N", help="check as if the machine had N GPUs (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    add_sections(parser, SECTIONS, lists=LISTS, only=_SETTINGS)
    parser.set_defaults(run_command=lambda settings: _run(parser, settings, check))


def _run(parser: argparse.ArgumentParser, settings: dict[str, Any], check: CheckModels) -> int:
    gpus, as_json = settings.pop("gpus", None), settings.pop("json", False)
    try:
        verdicts = check(load_config(settings, environ={}), gpus)
    except (ConfigError, PenstockError) as error:
        parser.error(str(error))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(verdicts)).decode())
    else:
        print("\n".join(_lines(verdicts)))
    return 1 if any(verdict.result == "refused" for verdict in verdicts) else 0


def _lines(verdicts: Sequence[Verdict]) -> Iterable[str]:
    width = max((len(verdict.model) for verdict in verdicts), default=0)
    for verdict in verdicts:
        yield f"{verdict.model:{width}}  {verdict.result}"
        yield from (f"{'':{width}}    {note.where}: {note.text}" for note in verdict.notes)
    counts = Counter(verdict.result for verdict in verdicts)
    noun = "model" if len(verdicts) == 1 else "models"
    yield f"{len(verdicts)} {noun}: " + ", ".join(_counted(counts[result], result) for result in _RESULTS)


def _counted(number: int, result: Result) -> str:
    return f"{number} {result if number == 1 else result.replace('works', 'work')}"
