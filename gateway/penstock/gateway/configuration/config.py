"""The configuration tree. Command line, file and environment are read into it, and nothing else configures a server.

`penstock.gateway.cli` derives the flags from the sections.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from penstock.engines.host.failure_text import one_line
from penstock.gateway.configuration.plain_values import bare, fields_of, plain_settings
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.other_models import (
    EmbeddingsConfig,
    RepositoryConfig,
    TrafficConfig,
    UpstreamConfig,
)
from penstock.gateway.configuration.sections.server import (
    AccessLogConfig,
    DataConfig,
    GrpcConfig,
    HttpConfig,
    OpenTelemetryConfig,
    ServerConfig,
)
from penstock.gateway.configuration.upstream_settings import upstream_fields

# Variables that Kubernetes puts into every pod for each service beside it, named after the service: for one that is
# called penstock, or penstock-something, they begin like ours.
#
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables

_NAME = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")


def is_service_link(variable: str, value: str) -> bool:
    """Most are told by their names; PENSTOCK_HTTP_PORT, which is a setting, too, by its value."""
    return bool(_NAME.fullmatch(variable) or (variable.endswith("_PORT") and _ADDRESS.fullmatch(value)))


class ConfigError(ValueError):
    """A setting that cannot be; the message names it."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a server, and those of its models."""

    models: ModelSettings = ModelSettings()
    """Of MODEL, in sections of their own; those that models beside it take, too, are marked (`beside`)."""
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    data: DataConfig = DataConfig()
    repository: RepositoryConfig = RepositoryConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    traffic: TrafficConfig = TrafficConfig()
    server: ServerConfig = ServerConfig()
    access_log: AccessLogConfig = AccessLogConfig()
    opentelemetry: OpenTelemetryConfig = OpenTelemetryConfig()
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()

    @property
    def has_model(self) -> bool:
        """Whether the command names MODEL, or means the demo model: it names no other model either."""
        named = self.repository.model_repository or self.embeddings.embedding_model or self.upstream.upstream
        return self.models.model.model is not None or not named


SECTIONS: dict[str, type[msgspec.Struct]] = {
    name: type(getattr(half, name))
    for half in (ModelSettings(), Config())
    for name in half.__struct_fields__
    if name != "models"
}
_PREFIX = "PENSTOCK_"
SETTINGS = frozenset(name for cls in SECTIONS.values() for name in cls.__struct_fields__)
_SECTION_OF = {name: section for section, cls in SECTIONS.items() for name in cls.__struct_fields__}


_Settings = TypeVar("_Settings", Config, ModelSettings)


def overlay(settings: _Settings, changes: Mapping[str, Any]) -> _Settings:
    """The settings with some changed, by name. Raises ConfigError."""
    tree = sections(settings)
    for name, value in changes.items():
        section = _SECTION_OF.get(name)
        if section is None or section not in tree:
            raise ConfigError(f"there is no setting called {name!r}")
        tree[section][name] = value
    return _convert(tree, type(settings))


def sections(settings: Config | ModelSettings) -> dict[str, dict[str, Any]]:
    """Plain values by section and name, those of MODEL beside those of the server."""
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(settings)
    return {**tree.pop("models"), **tree} if isinstance(settings, Config) else tree


def changes(config: Config) -> dict[str, Any]:
    """Plain values, by name, of the settings that are not the defaults."""
    defaults = sections(Config())
    return {
        name: value
        for section, settings in sections(config).items()
        for name, value in settings.items()
        if value != defaults[section][name]
    }


def load_config(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    table: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Flags win over PENSTOCK_* variables, those over the file, and that over the defaults. `table`: what such a file
    holds, where it is read already. Raises ConfigError."""
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    if file is not None:
        settings |= _settings(read_table(file), str(file))
        places |= dict.fromkeys(settings, str(file))
    if table is not None:
        settings |= _settings(table, "the given table")
    variables = _read_environment(environ)
    settings |= variables
    settings |= flags
    places |= {name: _PREFIX + name.upper() for name in variables}
    tree: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        tree[_SECTION_OF[name]][name] = value
    try:
        return _convert(tree, Config)
    except ConfigError as error:
        name = re.split(r"\W", str(error).replace("-", "_"), maxsplit=1)[0]
        if name in places and name not in flags:
            raise ConfigError(f"{error} (from {places[name]})") from None
        raise


def _convert(tree: Mapping[str, Any], kind: type[_Settings]) -> _Settings:
    """`tree`: settings by section and name. Raises ConfigError."""
    try:
        for name, read in (("traffic", _decoded), ("upstream", _upstream_tables)):
            if name in tree.get(name, ()):
                tree[name][name] = read(tree[name][name])
        plain = {section: plain_settings(SECTIONS[section], settings) for section, settings in tree.items() if settings}
        if kind is Config:
            plain["models"] = {name: plain.pop(name) for name in ModelSettings.__struct_fields__ if name in plain}
        settings = msgspec.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_wrong_value(str(error), tree)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if isinstance(settings, Config):
        _check(settings)
    return settings


def _check(config: Config) -> None:
    """Raises ConfigError for settings that do not fit together."""
    names = [rule.name for rule in config.traffic.traffic]
    if len(set(names)) < len(names):
        raise ConfigError("traffic: a name has two rules")
    names = [model.name for model in config.upstream.upstream]
    if len(set(names)) < len(names):
        raise ConfigError("upstream: two models have the same name")
    ready, hung = config.server.ready_timeout, config.server.watchdog_timeout
    if ready is not None and ready >= hung:
        raise ConfigError(
            f"ready-timeout: {ready:g} s is not below watchdog-timeout, {hung:g} s: the engine would be replaced "
            "before the server says that it is not ready"
        )


def _decoded(rules: Any) -> Any:
    """Rules that flags and variables give as JSON. Raises ConfigError."""
    if not isinstance(rules, list | tuple):
        raise ConfigError("traffic: it is a list of rules")
    try:
        return [msgspec.json.decode(rule) if isinstance(rule, str) else rule for rule in rules]
    except msgspec.DecodeError as error:
        raise ConfigError(f"traffic: a rule is a JSON object: {error}") from None


def _upstream_tables(models: Any) -> Any:
    """Raises ConfigError, ValueError."""
    if not isinstance(models, list | tuple):
        raise ConfigError("upstream: it is a list of models")
    return [upstream_fields(model) if isinstance(model, str) else model for model in models]


def _wrong_value(message: str, tree: Mapping[str, Mapping[str, Any]]) -> str:
    """msgspec's words for a wrong value, with the setting first, and with the value where it cannot be a secret."""
    problem, _, where = message.partition(" - at `$.")
    section, _, name = where.rstrip("`").removeprefix("models.").partition(".")
    fields = fields_of(SECTIONS[section]) if section else ()
    field = next((field for field in fields if field.name == name), None)
    if field is None:  # in a list or a table
        return explain(message)
    kind, value = bare(field.type), tree[section][name]
    if isinstance(kind, inspect.LiteralType):
        return f"{name}: {value!r} is not one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, inspect.StrType) and kind.pattern is not None and isinstance(field.type, inspect.Metadata):
        return f"{name}: it must be {(field.type.extra_json_schema or {}).get('description')}"
    if isinstance(kind, inspect.StrType | inspect.VarTupleType | inspect.UnionType):
        return f"{name}: {_in_words(problem)}"
    return f"{name}={value}: {_in_words(problem)}"


def _in_words(problem: str) -> str:
    for theirs, ours in _WORDS.items():
        problem = problem.replace(theirs, ours)
    return problem.removesuffix(", got `str`")


_WORDS = {
    "Expected `str` of length >= 1": "it must not be empty",
    " | null`": "`",
    "`int | float`": "a number",
    "`int`": "a whole number",
    "`float`": "a number",
    "`bool`": "true or false",
    "`str`": "text",
    "`array`": "a list",
    "`object`": "a table",
    "Expected": "expected",
}
"""In place of msgspec's."""


def explain(message: str) -> str:
    """msgspec's words for a wrong value, with the name of the setting first."""
    problem, separator, where = message.partition(" - at `$.")
    return f"{where.rstrip('`').rpartition('.')[2]}: {_in_words(problem)}" if separator else message


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or is_service_link(variable, text):
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name not in _SECTION_OF or not variable.isupper():
            raise ConfigError(f"{variable}: there is no such setting{_nearest(name)}")
        separator = "," if name in LISTS else ";" if name in PAIRS else None
        settings[name] = text.split(separator) if separator else text
    return settings


def _nearest(name: str) -> str:
    known = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, _SECTION_OF, 1)), None)
    return f"; did you mean {_PREFIX}{known.upper()}?" if known else ""


def read_table(path: Path) -> dict[str, Any]:
    """A configuration file as it stands. Raises ConfigError."""
    try:
        text = path.read_text()
        raw = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"config: cannot read {path}: {one_line(str(error))}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config: {path}: a configuration is a table of settings")
    return raw


def _settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """By name; they stand in their sections or at the top level, with `-` or `_` in names."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= value if key in SECTIONS and isinstance(value, dict) else {key: value}
    settings = {str(key).replace("-", "_"): value for key, value in flat.items()}
    several = (LISTS | PAIRS) & settings.keys()
    settings |= {name: [settings[name]] for name in several if isinstance(settings[name], str)}
    for name in settings:
        if name not in _SECTION_OF:
            hint = "; the table is for `penstock deploy ray`" if name == "ray" else ""
            raise ConfigError(f"config: {where}: there is no setting called {name!r}{hint}")
    return settings


LISTS = frozenset(
    (
        *("served_model_name", "api_key", "admin_key", "allowed_hosts", "allowed_origins"),
        *("model_repository", "load_model", "embedding_model", "allowed_media_domains"),
    )
)
"""Settings that take several values: repeated flags, comma-separated variables, arrays in files."""
PAIRS = frozenset(
    (
        *("backend_config", "cache_config", "trace_config", "metrics_config", "lora"),
        *("http_restricted_api", "grpc_restricted_protocol"),
        *("rate_limit_resource", "traffic", "upstream"),
    )
)
"""The same for values that have commas of their own: variables separate them by semicolons."""
OTHER_NAMES = {
    "port": "http_port",
    "model_store": "model_repository",
    "exit_timeout_secs": "drain_timeout",
}
"""Flags by which other servers know our settings: most have one port, two are older ones of Triton's. Not variables:
Kubernetes sets PENSTOCK_PORT for a service of that name."""
