"""The configuration tree. Command line, file and environment are read into it, and nothing else configures a server.

Each field's type, bounds and description stand here once; `penstock.gateway.cli` derives the flags from them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
"""Never empty: `--api-key "$KEY"` without a KEY must not let in whoever sends an empty one, nor everybody."""


class ConfigError(ValueError):
    """A setting that cannot be; the message names it."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, run by which engine."""

    model: Annotated[
        str | None,
        Meta(description="a local Hugging Face folder or a hub id; without one, the demo model that comes along"),
    ] = None
    served_model_name: Annotated[
        tuple[Name, ...], Meta(description="the model's public names, the first one is reported; default: MODEL's name")
    ] = ()
    engine: Annotated[
        Literal["auto", "openvino", "simulated"],
        Meta(description="what runs the model; auto is openvino; simulated needs no weights and talks nonsense"),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None, Meta(description="most tokens of a request, prompt and output; default: the model's own limit")
    ] = None
    dtype: Annotated[
        Literal["auto", "bf16", "f16", "f32"],
        Meta(description="precision of the computation; auto: bf16 where the CPU has it"),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "bf16", "f16", "f32", "int8"],
        Meta(description="how weights are kept; auto: as in the checkpoint"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "u8", "bf16", "f16", "f32"], Meta(description="how keys and values are kept")
    ] = "auto"
    threads: Annotated[Positive | None, Meta(description="compute threads; default: by model size and cores")] = None
    chat_template: Annotated[
        str | None, Meta(description="file with a chat template to use instead of the model's own")
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory for keys and values."""

    kv_cache_memory: Annotated[
        str | Positive | None,
        Meta(description="bytes, a size like 4GiB, or a share of free memory like 40%%; default: a bounded share"),
    ] = None
    num_kv_blocks: Annotated[Positive | None, Meta(description="the same as a number of blocks")] = None
    prefix_caching: Annotated[bool, Meta(description="reuse the keys and values of prompts with equal beginnings")] = (
        True
    )


class SchedulingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who runs when, and how many may wait."""

    max_num_seqs: Annotated[Positive, Meta(description="most requests in one step")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(description="most tokens in one step; long prompts are computed in chunks; default: 512 or max-num-seqs"),
    ] = None
    policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        Meta(description="fcfs: by arrival; priority: lower first, with ageing; fair: by tokens served per tenant"),
    ] = "fcfs"
    ageing: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="policy priority: seconds of waiting worth one level")
    ] = 10.0
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="requests that may wait; more get 503 with Retry-After")
    ] = 1024
    max_queued_tokens: Annotated[Positive, Meta(description="prompt tokens that may wait")] = 1_048_576
    request_timeout: Annotated[
        Seconds, Meta(description="seconds from arrival to the last token, queueing included; 0: no limit")
    ] = 0.0


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the server listens, and how it behaves towards clients."""

    host: Annotated[str, Meta(description="address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    http_port: Annotated[Port, Meta(description="OpenAI API and health")] = 8000
    grpc_port: Annotated[Port, Meta(description="gRPC: the standard health service")] = 8001
    metrics_port: Annotated[Port, Meta(description="Prometheus metrics and the scheduler's state, without a key")] = (
        8002
    )
    api_key: Annotated[
        tuple[Name, ...],
        Meta(description="accepted bearer keys; each is a tenant of its own; default: no key is asked for"),
    ] = ()
    drain_timeout: Annotated[Seconds, Meta(description="seconds that running requests get to finish after SIGTERM")] = (
        30.0
    )
    stream_interval_ms: Annotated[
        Seconds,
        Meta(
            description="running streams get their new tokens at most this often; first tokens never wait; 0: each step"
        ),
    ] = 10.0
    send_timeout: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="seconds after which a client that does not read is cut off")
    ] = 60.0
    watchdog_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds without a sign of life after which the engine is replaced"),
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much is logged, to stderr")
    ] = "info"


class SimulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated engine's latency model."""

    sim_step_ms: Annotated[Seconds, Meta(description="milliseconds per step")] = 0.0
    sim_prefill_us: Annotated[Seconds, Meta(description="microseconds per prompt token")] = 0.0
    sim_sequence_us: Annotated[Seconds, Meta(description="microseconds per sequence in a step")] = 0.0
    sim_faults: Annotated[
        str, Meta(description='faults by marker token in the prompt, e.g. "kill=7,nan=8"; for tests')
    ] = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    server: ServerConfig = ServerConfig()
    simulated: SimulatedOptions = SimulatedOptions()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduling": SchedulingConfig,
    "server": ServerConfig,
    "simulated": SimulatedOptions,
}
_SECTION_OF = {name: section for section, cls in SECTIONS.items() for name in cls.__struct_fields__}


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """Flags win over PENSTOCK_* variables, those over the file, and that over the defaults. Raises ConfigError."""
    settings: dict[str, Any] = {}
    if file is not None:
        settings |= _read_file(file)
    settings |= _read_environment(environ)
    settings |= flags
    tree: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        tree[_SECTION_OF[name]][name] = value
    try:
        return msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from None


def _explain(message: str) -> str:
    problem, separator, where = message.partition(" - at `$.")
    return f"{where.rstrip('`').rpartition('.')[2]}: {problem}" if separator else message


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _SECTION_OF:
        text = environ.get(f"PENSTOCK_{name.upper()}")
        if text is not None:
            found[name] = text.split(",") if name in LISTS else text
    return found


def _read_file(path: Path) -> dict[str, Any]:
    """Settings by name, in their sections or at the top level, `-` or `_` in names."""
    try:
        text = path.read_text()
        raw = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a configuration is a table of settings")
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= value if key in SECTIONS and isinstance(value, dict) else {key: value}
    settings = {str(key).replace("-", "_"): value for key, value in flat.items()}
    settings |= {name: [settings[name]] for name in LISTS & settings.keys() if isinstance(settings[name], str)}
    for name in settings:
        if name not in _SECTION_OF:
            raise ConfigError(f"{path}: there is no setting called {name!r}")
    return settings


LISTS = frozenset({"served_model_name", "api_key"})
"""Settings that take several values: repeated flags, comma-separated variables, arrays in files."""
