"""Settings of the process: ports, keys, limits, its end, and what is kept of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.engines.host.user_cache import user_cache
from penstock.gateway.configuration.sections.types import (
    Address,
    File,
    Folder,
    Key,
    ListeningPort,
    Memory,
    Milliseconds,
    Name,
    Port,
    Positive,
    Seconds,
    SomeBytes,
    SomeMilliseconds,
    SomeSeconds,
    WholeMilliseconds,
)


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the server listens, and how it behaves towards clients."""

    id: Annotated[Name, Meta(description="the server's name in its KServe metadata")] = "penstock"
    host: Annotated[
        Address,
        Meta(
            description="address to listen on; 0.0.0.0 for all; beyond this machine, it needs keys or --allow-anonymous"
        ),
    ] = "127.0.0.1"
    http_address: Annotated[Address | None, Meta(description="address for HTTP; default: host")] = None
    grpc_address: Annotated[Address | None, Meta(description="address for gRPC; default: host")] = None
    metrics_address: Annotated[Address | None, Meta(description="address for metrics; default: host")] = None
    http_port: Annotated[Port, Meta(description="OpenAI API, KServe v2 and health")] = 8000
    grpc_port: Annotated[Port, Meta(description="KServe v2 over gRPC, and the standard health service")] = 8001
    metrics_port: Annotated[
        Port,
        Meta(
            description="Prometheus metrics and the scheduler's state; on this machine's addresses metrics need no key"
        ),
    ] = 8002
    allow_http: Annotated[bool, Meta(description="listen for HTTP")] = True
    allow_http2: Annotated[bool, Meta(description="HTTP/2 on the HTTP port, beside HTTP/1.1")] = True
    allow_grpc: Annotated[bool, Meta(description="listen for gRPC")] = True
    allow_metrics: Annotated[bool, Meta(description="listen on the metrics port")] = True
    http_max_input_size: Annotated[
        SomeBytes, Meta(description="bytes of a KServe request, decompressed; gRPC messages have the same limit")
    ] = 64 << 20
    strict_liveness: Annotated[
        bool,
        Meta(description="not live once one language model is down for good; off: only when no other model is left"),
    ] = False
    body_memory: Annotated[
        SomeBytes, Meta(description="most bytes of request bodies, also decompressed ones, in memory at one time")
    ] = 1 << 30
    stored_responses: Annotated[
        int, Meta(ge=0, description="responses that are kept, and as many conversations and chats; 0: none")
    ] = 1000
    stored_responses_per_tenant: Annotated[
        Positive | None, Meta(description="the same for one key's tenant; default: stored-responses")
    ] = None
    stored_responses_memory: Annotated[
        SomeBytes,
        Meta(
            description="bytes of all kept responses, of all conversations, of all chats; least recently used go first"
        ),
    ] = 64 << 20
    stored_responses_memory_per_tenant: Annotated[
        SomeBytes | None, Meta(description="the same for one key's tenant; default: stored-responses-memory")
    ] = None
    background_responses: Annotated[
        int, Meta(ge=0, description="responses in progress in the background at one time; 0: none")
    ] = 100
    background_responses_per_tenant: Annotated[
        Positive | None, Meta(description="the same for one key's tenant; default: background-responses")
    ] = None
    max_loop_lag: Annotated[
        Seconds,
        Meta(description="while the event loop is this many seconds late, inference requests get 503; 0: never"),
    ] = 2.0
    body_timeout: Annotated[
        SomeSeconds, Meta(description="seconds that the whole body of an HTTP request may take")
    ] = 600.0
    http_header_forward_pattern: Annotated[
        str,
        Meta(
            extra={"metavar": "REGEX"},
            description="HTTP headers whose whole name matches this become request parameters",
        ),
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str,
        Meta(
            extra={"metavar": "REGEX"},
            description="gRPC metadata whose whole name matches this become request parameters",
        ),
    ] = ""
    allow_client_shm: Annotated[
        bool, Meta(description="clients on this machine may pass tensors through system shared memory")
    ] = False
    api_key: Annotated[
        tuple[Key, ...],
        Meta(
            description="accepted bearer keys for inference, metadata and metrics; each is a tenant of its own; "
            "default: no key is needed"
        ),
    ] = ()
    admin_key: Annotated[
        tuple[Key, ...],
        Meta(description="accepted bearer keys that may also load and unload models and change settings"),
    ] = ()
    api_key_file: Annotated[
        File | None,
        Meta(
            description="a TOML file of keys with tenants, roles and limits, written by `penstock key new`; read again "
            "on SIGHUP"
        ),
    ] = None
    http_restricted_api: Annotated[
        tuple[str, ...],
        Meta(
            extra={"metavar": "API:HEADER=VALUE"},
            description="as API[,API]:HEADER=VALUE: requests to these KServe APIs need this header too; may be "
            "repeated",
        ),
    ] = ()
    grpc_restricted_protocol: Annotated[
        tuple[str, ...],
        Meta(
            extra={"metavar": "API:HEADER=VALUE"},
            description="the same over gRPC, where the header is triton-grpc-protocol-HEADER; may be repeated",
        ),
    ] = ()
    allow_anonymous: Annotated[
        bool,
        Meta(description="other machines may use a server without keys; on a server with keys, only /metrics"),
    ] = False
    allowed_hosts: Annotated[
        tuple[Name, ...],
        Meta(
            description="host names by which clients may call a server without keys, besides localhost and its "
            "addresses; others are refused, to protect the server from web pages"
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "URL"},
            description="origins of web pages that may use the server, as http://localhost:3000; with keys also *",
        ),
    ] = ()
    console: Annotated[
        bool | None,
        Meta(
            description="the console, a page for operators at /console; default: on a server without keys that only "
            "this machine reaches, where it is read-only; elsewhere it needs an admin's key"
        ),
    ] = None
    memory_limit: Annotated[
        Memory | None,
        Meta(
            description="memory of all language models together, as bytes, a size like 16GiB, or a share of free "
            "memory; a model that would not fit is not loaded; default: what is free"
        ),
    ] = None
    fronts: Annotated[
        Annotated[int, Meta(ge=1, le=64, extra={"metavar": "N"})] | Literal["auto"],
        Meta(
            description="front processes that handle connections, all on the same ports; auto: one for every 8 cores, "
            "at least 1 and at most 8"
        ),
    ] = 1
    load_reports: Annotated[
        Literal["request", "text", "json", "bin"],
        Meta(
            description="which answers to inferences carry the server's load for balancers (ORCA): request: those "
            "whose request asks for it; text, json, bin: all, in this form; over gRPC always as bin"
        ),
    ] = "request"
    vllm_metric_names: Annotated[
        bool,
        Meta(
            description="metrics that endpoint pickers read (Gateway API inference extension, llm-d) also have vLLM's "
            "names"
        ),
    ] = False
    drain_delay: Annotated[
        Seconds,
        Meta(
            description="seconds after SIGTERM in which the server says that it is not ready and still serves new "
            "requests, for balancers that need a moment to notice"
        ),
    ] = 0.0
    drain_timeout: Annotated[Seconds, Meta(description="seconds that running requests get to finish after SIGTERM")] = (
        30.0
    )
    stream_interval_ms: Annotated[
        Milliseconds,
        Meta(
            description="running streams get their new tokens at most this often; first tokens never wait; 0: each step"
        ),
    ] = 10.0
    clamp_max_tokens: Annotated[
        bool,
        Meta(
            description="requests whose max_tokens do not fit into the context behind their prompt get as many as fit; "
            "off: they are refused, with the number that would fit"
        ),
    ] = True
    default_model: Annotated[
        str | None,
        Meta(
            description="name of the model for requests that name none; default: the only model that such a request "
            "can use; several: it is refused",
            extra={"metavar": "NAME"},
        ),
    ] = None
    allowed_media_domains: Annotated[
        tuple[Name, ...],
        Meta(
            description="domains that images are fetched from, as images.example.com, or *.example.com for all names "
            "that end so; private addresses never are; default: URLs of other servers are refused",
        ),
    ] = ()
    strict_requests: Annotated[
        bool,
        Meta(
            description="requests with fields that this server would ignore or read another way are refused; off: they "
            "are answered, and the header x-penstock-ignored names those fields"
        ),
    ] = False
    keep_alive: Annotated[
        SomeSeconds,
        Meta(description="seconds that an idle HTTP connection stays open; set more than in proxies before the server"),
    ] = 75.0
    heartbeat_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a token after which a stream of the OpenAI API gets an SSE comment, so that "
            "proxies do not close it; 0: never"
        ),
    ] = 15.0
    resumable_streams: Annotated[
        Seconds,
        Meta(
            description="seconds for which a stream of chats or text completions goes on after its client has lost the "
            "connection; the client gets the rest with Last-Event-ID; 0: it ends with the connection"
        ),
    ] = 0.0
    send_timeout: Annotated[
        SomeSeconds,
        Meta(description="seconds after which a client that does not read its answer is disconnected"),
    ] = 60.0
    watchdog_timeout: Annotated[
        Annotated[float, Meta(ge=0.4, extra={"unit": "s"})],
        Meta(
            description="seconds without progress after which the engine is replaced; a step that was expected to take "
            "long gets more"
        ),
    ] = 60.0
    ready_timeout: Annotated[
        Annotated[float, Meta(ge=0.2, extra={"unit": "s"})] | None,
        Meta(
            description="seconds without progress of the engine after which the server is not ready; a step that was "
            "expected to take long gets more; default: 10, or half of watchdog-timeout where that is less"
        ),
    ] = None
    load_timeout: Annotated[
        Seconds, Meta(description="seconds after which an engine that is still loading its model is ended; 0: never")
    ] = 1800.0
    crash_dir: Annotated[
        str | None,
        Meta(
            description="folder for reports of crashed processes, without texts of requests; the newest 10 are "
            "kept, and none with an empty name; default: ~/.cache/penstock/crashes"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much is logged, to stderr")
    ] = "info"
    log_verbose: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="above 0: the same as log level debug, as Triton calls it")
    ] = 0
    log_info: Annotated[bool, Meta(description="log information")] = True
    log_warning: Annotated[bool, Meta(description="log warnings")] = True
    log_error: Annotated[bool, Meta(description="log errors")] = True
    log_format: Annotated[
        Literal["default", "ISO8601"], Meta(description="how the log writes times; ISO8601: in UTC, with a T and a Z")
    ] = "default"
    log_file: Annotated[
        File, Meta(description="file that the log is appended to, and all that this server writes to stderr")
    ] = ""
    trace_config: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "KEY=VALUE"},
            description="a setting of Triton's request trace, as level=, rate=, count=, triton,file=; may be repeated",
        ),
    ] = ()
    allow_gpu_metrics: Annotated[bool, Meta(description="nv_gpu_* where there are GPUs and the extra [gpu]")] = True
    allow_cpu_metrics: Annotated[bool, Meta(description="nv_cpu_*, the load of this machine")] = True
    metrics_config: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "KEY=VALUE"},
            description="which latencies nv_* show: summary_latencies=, histogram_latencies= or counter_latencies= "
            "true or false, summary_quantiles=0.5:0.05,0.9:0.01; may be repeated",
        ),
    ] = ()

    def address(self, port: ListeningPort) -> str:
        """Where that port listens."""
        own: str | None = getattr(self, f"{port}_address")
        return own or self.host

    @property
    def crash_folder(self) -> Path | None:
        """None: nothing is kept of crashes."""
        if self.crash_dir is None:
            return user_cache("crashes")
        return Path(self.crash_dir).expanduser() if self.crash_dir else None

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key or self.admin_key or self.api_key_file is not None)

    @property
    def logging_level(self) -> str:
        """The name of Python's level, for this process and those that it starts: the lowest that is logged."""
        levels = ("DEBUG", "INFO", "WARNING", "ERROR")
        first = 0 if self.log_verbose else levels.index(self.log_level.upper())
        return next((level for level in levels[first:] if getattr(self, f"log_{level.lower()}", True)), "CRITICAL")

    @property
    def log_switches(self) -> dict[str, bool | str]:
        """Triton's log settings as far as they are not its defaults."""
        off: dict[str, bool | str] = {
            name: False for name in ("log_info", "log_warning", "log_error") if not getattr(self, name)
        }
        return off if self.log_format == "default" else off | {"log_format": self.log_format}


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS of the HTTP port."""

    http_use_ssl: Annotated[bool, Meta(description="TLS; needs a certificate and its key")] = False
    http_use_ssl_mutual: Annotated[bool, Meta(description="clients must show a certificate, too")] = False
    http_server_cert: Annotated[File, Meta(description="PEM file with the server's certificate")] = ""
    http_server_key: Annotated[File, Meta(description="PEM file with its private key")] = ""
    http_root_cert: Annotated[File, Meta(description="PEM file with the authority of clients' certificates")] = ""


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS, keepalive and compression of the gRPC port, under Triton's own flags."""

    grpc_transport: Annotated[
        Literal["penstock", "grpcio"],
        Meta(description="what serves HTTP/2 on the gRPC port: this server itself, or the gRPC library"),
    ] = "penstock"
    grpc_use_ssl: Annotated[bool, Meta(description="TLS; needs a certificate and its key")] = False
    grpc_use_ssl_mutual: Annotated[bool, Meta(description="clients must show a certificate, too")] = False
    grpc_server_cert: Annotated[File, Meta(description="PEM file with the server's certificate")] = ""
    grpc_server_key: Annotated[File, Meta(description="PEM file with its private key")] = ""
    grpc_root_cert: Annotated[File, Meta(description="PEM file with the authority of clients' certificates")] = ""
    grpc_infer_response_compression_level: Annotated[
        Literal["none", "low", "medium", "high"], Meta(description="compression of inference responses")
    ] = "none"
    grpc_keepalive_time: Annotated[SomeMilliseconds, Meta(description="milliseconds of silence before a ping")] = (
        7_200_000
    )
    grpc_keepalive_timeout: Annotated[SomeMilliseconds, Meta(description="milliseconds that its answer may take")] = (
        20_000
    )
    grpc_keepalive_permit_without_calls: Annotated[bool, Meta(description="ping connections without calls")] = False
    grpc_http2_max_pings_without_data: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="pings in a row without data between them; 0: any number")
    ] = 2
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        SomeMilliseconds, Meta(description="milliseconds that clients must leave between pings without data")
    ] = 300_000
    grpc_http2_max_ping_strikes: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="premature pings tolerated on a connection; 0: any number")
    ] = 2
    grpc_max_connection_age: Annotated[
        WholeMilliseconds, Meta(description="milliseconds after which a connection is closed; 0: never")
    ] = 0
    grpc_max_connection_age_grace: Annotated[
        WholeMilliseconds, Meta(description="milliseconds that its calls get then; 0: as long as they take")
    ] = 0


class AccessLogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line on standard error for each request."""

    access_log: Annotated[
        Literal["text", "json", "off"],
        Meta(description="a line for each request that has ended, without its contents; probes have none"),
    ] = "text"
    access_log_sample: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="share of the successful requests that get a line; failed ones always get one"),
    ] = 1.0
    access_log_slow_s: Annotated[
        Seconds, Meta(description="successful requests get a line only if they took this many seconds")
    ] = 0.0


class OpenTelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, for a collector."""

    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+[^\s?#]*$", extra={"metavar": "URL"})] | None,
        Meta(
            description="URL of a collector that gets spans of requests by OTLP over HTTP, as http://localhost:4318; "
            "needs the extra [otel]; default: none"
        ),
    ] = None
    otlp_sample: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="share of the requests without a traceparent that get spans"),
    ] = 1.0


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files, batches, and responses that are kept."""

    data_dir: Annotated[
        Folder | None,
        Meta(
            description="folder for files, batches and responses, for this server alone; default: none: all is in "
            "memory until the server ends"
        ),
    ] = None
    data_memory: Annotated[
        Annotated[int, Meta(ge=0, extra={"unit": "bytes"})],
        Meta(description="bytes of files and batches in memory, where there is no data-dir; 0: they are refused"),
    ] = 64 << 20
    data_size: Annotated[SomeBytes, Meta(description="bytes of all files in data-dir together")] = 10 << 30
    data_size_per_tenant: Annotated[
        SomeBytes | None, Meta(description="bytes of the files of one key's tenant; default: data-size, or data-memory")
    ] = None
    data_retention: Annotated[
        Seconds,
        Meta(description="seconds after which files, ended batches, responses and conversations are deleted; 0: never"),
    ] = 30 * 86400.0
    batch_lines_in_flight: Annotated[
        Positive, Meta(description="lines of batches that the models work on at one time")
    ] = 32
