"""The sections of the configuration tree: each setting's type, bounds, default and description stand here once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engines.scheduler import config as scheduler_config
from penstock.gateway.configuration.traffic_rules import TrafficRule
from penstock.gateway.configuration.upstream_settings import UpstreamSettings

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
ListeningPort = Literal["http", "grpc", "metrics"]
Name = Annotated[str, Meta(min_length=1)]
"""Never empty: `--api-key "$KEY"` without a KEY must not let in clients that send an empty one, or no key at all."""


class LanguageModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, run by which engine."""

    model: Annotated[
        str | None,
        Meta(description="a local Hugging Face folder or a hub id; without one, the built-in demo model"),
    ] = None
    revision: Annotated[Name | None, Meta(description="branch, tag or commit of a hub model; default: main")] = None
    sleep_idle_seconds: Annotated[
        Seconds,
        Meta(
            description="a model without requests for so long gives its memory back, and is loaded again at the next "
            "request, which waits; 0: never"
        ),
    ] = 0.0
    served_model_name: Annotated[
        tuple[Name, ...], Meta(description="the model's public names, the first one is reported; default: MODEL's name")
    ] = ()
    engine: Annotated[
        Literal["auto", "openvino", "vllm", "tensorrt_llm", "torch", "simulated"],
        Meta(
            description="what runs the model; auto: vllm or torch with a GPU, torch where openvino lacks the "
            "architecture, else openvino; simulated needs no weights and talks nonsense"
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            description="cpu, cuda or cuda:N; auto: the GPU where the engine can use one",
            pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None, Meta(description="most tokens of a request, prompt and output; default: the model's own limit")
    ] = None
    dtype: Annotated[
        Literal["auto", "bf16", "f16", "f32"],
        Meta(description="precision of the computation; auto: bf16 where the CPU has it, f32 for encoders"),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "bf16", "f16", "f32", "int8", "int4"],
        Meta(description="how weights are kept; auto: as in the checkpoint"),
    ] = "auto"
    activations: Annotated[
        Literal["auto", "int8", "mixed", "bf16", "f16", "f32"],
        Meta(
            description="what int8 and int4 weights are multiplied with: int8, or the type that dtype means; auto: "
            "int8 where the CPU has that in this type, else the type; int8: dtype=auto may become f32 for it; mixed: "
            "int8 in small steps and bf16 in large ones, for CPUs with AMX, with twice the memory for weights"
        ),
    ] = "auto"
    weights_cache: Annotated[
        int, Meta(ge=0, description="bytes of quantized weights kept on disk for later starts; 0: none")
    ] = 20 << 30
    kv_cache_dtype: Annotated[
        Literal["auto", "u8", "u8-u4", "u4", "fp8", "bf16", "f16", "f32"],
        Meta(
            description="how keys and values are kept: u8, u4, and u8-u4 (keys in 8 bits, values in 4) by openvino, "
            "fp8 by vllm and tensorrt_llm"
        ),
    ] = "auto"
    threads: Annotated[Positive | None, Meta(description="compute threads; default: by model size and cores")] = None
    cpus: Annotated[
        Name | None, Meta(description="CPUs that the engine's process runs on, as 0-15,32-47; default: all")
    ] = None
    numa_nodes: Annotated[
        Name | None,
        Meta(
            description="NUMA nodes whose CPUs and memory the engine's process uses, as 0 or 0-1; auto: those of the "
            "socket with the most free memory; default: all"
        ),
    ] = None
    speculative_model: Annotated[
        Name | None,
        Meta(
            description="openvino: a smaller model with the same vocabulary (a folder, a GGUF file or a hub id), or an "
            "EAGLE-3 head, that guesses next tokens, of which several are verified in a step; answers stay the same"
        ),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="file with a chat template to use instead of the model's own")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="how the chat template takes content parts: joined, or as a list; auto: as its loops tell"),
    ] = "auto"
    special_tokens_in_content: Annotated[
        bool,
        Meta(description="the text of a special token in a chat message is that token; default: it is ordinary text"),
    ] = False
    tool_parser: Annotated[
        str, Meta(description="finds tool calls in answers: a parser's name, none, or auto: by the chat template")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Meta(description="finds reasoning in answers: a parser's name, none, or auto: by the chat template")
    ] = "auto"


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines a language model has, and what becomes of a request when one of them dies."""

    replicas: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        Meta(
            description="engines of the same model, each a process with the model in its memory; they share the CPUs, "
            "or have the numa-nodes one by one; 0: none here, with replica-address"
        ),
    ] = 1
    replica_address: Annotated[
        tuple[Name, ...],
        Meta(description="engine-doors of other Penstocks with the same model, whose engines are further replicas"),
    ] = ()
    replica_routing: Annotated[
        Literal["prefix", "least-loaded", "round-robin"],
        Meta(
            description="which replica gets a request: prefix: where the least has to be computed before its first "
            "token, by cached prefix and load; least-loaded: by load; round-robin: in turn"
        ),
    ] = "prefix"
    prefill_replicas: Annotated[
        Annotated[int, Meta(ge=0, le=63)],
        Meta(
            description="openvino, vllm on CPUs, simulated: so many of the replicas compute long prompts, and hand "
            "their keys and values over to the others, which generate; 0: each computes its own prompts"
        ),
    ] = 0
    handover_bytes: Annotated[
        Positive, Meta(description="most bytes of shared memory for what prefill-replicas hand over")
    ] = 2 << 30
    handover_min_tokens: Annotated[
        Positive,
        Meta(description="prompts of which less is left to compute are computed where they go on, not handed over"),
    ] = 128
    resume: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="a stream whose engine dies goes on behind its tokens; auto: where there are several replicas; "
            "on: with a single one, too, once it has been restarted; off: it ends with an error"
        ),
    ] = "auto"
    resume_wait: Annotated[
        Seconds, Meta(description="the longest that such a stream waits for an engine that can take it, in seconds")
    ] = 60.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What only the large engines have: several devices, quantized kernels, options of their own."""

    tensor_parallel_size: Annotated[
        Positive, Meta(description="vllm, tensorrt_llm: devices that share each layer of the model")
    ] = 1
    pipeline_parallel_size: Annotated[
        Positive, Meta(description="vllm, tensorrt_llm: devices that have different layers of the model")
    ] = 1
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="vllm, tensorrt_llm: share of each GPU's memory that this model may take"),
    ] = 0.9
    quantization: Annotated[
        Name | None, Meta(description="vllm: its name of a quantization; default: what the checkpoint says")
    ] = None
    engine_args: Annotated[
        str | dict[str, Any],
        Meta(
            description="more options of the engine itself, as a JSON object: fields of vLLM's EngineArgs, arguments "
            "of TensorRT-LLM's LLM"
        ),
    ] = {}


class DoorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that other Penstocks use, or that runs in another Penstock."""

    engine_door: Annotated[
        Name | None,
        Meta(
            description="where other Penstocks can use the engine of MODEL, as ipc:///PATH or tcp://HOST:PORT; "
            "default: nowhere"
        ),
    ] = None
    engine_door_clients: Annotated[Positive, Meta(description="most of them at one time")] = 64
    engine_address: Annotated[
        Name | None,
        Meta(description="the engine-door of another Penstock, whose engine runs MODEL; no engine is started here"),
    ] = None
    engine_key: Annotated[
        Name | None,
        Meta(description="file with the key that both sides share, made by `penstock key new --engine`; tcp needs one"),
    ] = None


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA adapters, each a model of its own for clients; on the openvino, vllm, tensorrt_llm and torch engines."""

    lora: Annotated[
        tuple[Name, ...], Meta(description="an adapter, as NAME=FOLDER with files in PEFT's format; may be repeated")
    ] = ()
    lora_directory: Annotated[
        Name | None,
        Meta(description="clients may load and unload adapters at run time, from below this folder; default: no"),
    ] = None
    max_loras: Annotated[Positive, Meta(description="adapters that may be loaded at the same time")] = 8
    max_lora_rank: Annotated[Positive, Meta(description="highest rank of an adapter")] = 16


class EmbeddingsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models that give embeddings, scores and classes."""

    embedding_model: Annotated[
        tuple[Name, ...],
        Meta(
            description="an embedding or ranking model beside MODEL, as FOLDER, hub id, or NAME=FOLDER; may be repeated"
        ),
    ] = ()
    embedding_batch_tokens: Annotated[
        Positive, Meta(description="most tokens of the texts that an encoder computes together")
    ] = 4096


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files, batches, and responses that are kept."""

    data_dir: Annotated[
        str | None,
        Meta(
            description="folder for files, batches and responses, of this server alone; default: none, files and "
            "batches are refused, and responses kept in memory"
        ),
    ] = None
    data_size: Annotated[Positive, Meta(description="bytes of all files together")] = 10 << 30
    data_size_per_tenant: Annotated[
        Positive | None, Meta(description="bytes of the files of one key's tenant; default: data-size")
    ] = None
    data_retention: Annotated[
        Seconds,
        Meta(description="seconds after which files, ended batches, responses and conversations go; 0: never"),
    ] = 30 * 86400.0
    batch_lines_in_flight: Annotated[
        Positive, Meta(description="lines of batches that are with the models at one time")
    ] = 32


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
    kv_offload_dir: Annotated[
        Name | None,
        Meta(
            description="openvino, vllm on CPUs, simulated: folder for what the prefix cache evicts, also for later "
            "starts; default: it is lost"
        ),
    ] = None
    kv_offload_bytes: Annotated[Positive, Meta(description="most bytes of a model's blocks in kv-offload-dir")] = (
        10 << 30
    )
    kv_events: Annotated[
        Name | None,
        Meta(
            description="address, as tcp://127.0.0.1:5557, where routers learn which blocks the prefix cache has; who "
            "reaches it reads the tokens of all prompts; default: none"
        ),
    ] = None
    kv_events_replay: Annotated[
        Name | None, Meta(description="address where they can ask for events that they have missed; default: none")
    ] = None
    kv_events_topic: Annotated[
        str | None, Meta(description="topic of these events; default: kv@HOST@MODEL, as llm-d reads it")
    ] = None


class SchedulingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who runs when, and how many may wait."""

    scheduler: Annotated[
        Literal["auto", "penstock", "engine"],
        Meta(
            description="whose scheduler runs vllm or simulated: penstock's with its own KV cache, or the engine's own "
            "behind penstock's queue; auto: penstock's for the models that it can drive"
        ),
    ] = "auto"
    max_num_seqs: Annotated[Positive, Meta(description="most requests in one step")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="most tokens in one step; long prompts are computed in chunks; default: 512, with a GPU 4096, "
            "or max-num-seqs"
        ),
    ] = None
    itl_target_ms: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(
            description="while requests generate, prompts get as much of a step as keeps it within so many "
            "milliseconds, by the measured speed (while none generates: four times as many); 0: always as much as "
            "max-num-batched-tokens allows"
        ),
    ] = 200.0
    steps_in_flight: Annotated[
        Positive, Meta(description="steps that are under way at the same time, as far as the engine can; 1: one by one")
    ] = 2
    speculative: Annotated[
        Literal["off", "ngram", "mtp"],
        Meta(
            description="ngram: next tokens are guessed from what the request has said before (prompt lookup), and "
            "several are verified in a step; answers stay the same. mtp: the checkpoint's own layer for multi-token "
            "prediction guesses (openvino, MiMo)"
        ),
    ] = "off"
    max_draft_tokens: Annotated[Positive, Meta(description="most guesses verified in one step of a request")] = 8
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


OF_OUR_SCHEDULER = {name: getattr(SchedulingConfig(), name) for name in scheduler_config.OF_OUR_SCHEDULER}
"""Settings that mean nothing to an engine that schedules by itself, and their defaults."""


class RepositoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models from Triton model repositories, under Triton's own flags."""

    model_repository: Annotated[
        tuple[Name, ...],
        Meta(description="folder or s3://, gs://, as:// location of a model repository; may be repeated"),
    ] = ()
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"],
        Meta(description="none: load all models at start; poll: follow changes; explicit: load and unload by request"),
    ] = "none"
    repository_poll_secs: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="control mode poll: seconds between two looks")
    ] = 15.0
    load_model: Annotated[
        tuple[Name, ...], Meta(description="control mode explicit: models to load at start, * for all; may be repeated")
    ] = ()
    load_on_demand: Annotated[
        bool,
        Meta(
            description="control mode explicit: load a model when a request asks for it, and unload the least recently "
            "used ones to make room; those of --load-model stay"
        ),
    ] = False
    load_on_demand_wait: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="the longest that a request waits for its model, in seconds")
    ] = 300.0
    load_on_demand_queue: Annotated[
        Positive, Meta(description="requests that wait for models at the same time, for all models together")
    ] = 1024
    unload_after_idle: Annotated[
        float,
        Meta(ge=0, description="with --load-on-demand: unload a model that nobody used for so many seconds; 0: never"),
    ] = 0.0
    exit_on_error: Annotated[bool, Meta(description="end when a model cannot be loaded at start")] = True
    strict_readiness: Annotated[bool, Meta(description="ready only while all models are")] = True
    disable_auto_complete_config: Annotated[
        bool, Meta(description="take configurations as they are written, without a look into the model files")
    ] = False
    model_config_name: Annotated[
        str, Meta(description="use configs/NAME.pbtxt of a model where there is one, else config.pbtxt")
    ] = ""
    model_load_thread_count: Annotated[Positive, Meta(description="models that are loaded at the same time")] = 4
    model_load_retry_count: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="how often loading a model is tried again at start")
    ] = 0
    cache_config: Annotated[
        tuple[Name, ...],
        Meta(
            description="the response cache: local,size=BYTES, or redis,host=NAME, redis,port=NUMBER; may be repeated"
        ),
    ] = ()
    response_cache_byte_size: Annotated[
        int, Meta(ge=0, description="bytes of a local response cache; 0: none, or that of --cache-config")
    ] = 0
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        Meta(
            description="execution_count: instances of classic models wait for the resources that their "
            "instance_group.rate_limiter names; off: it has no effect"
        ),
    ] = "off"
    rate_limit_resource: Annotated[
        tuple[Name, ...],
        Meta(
            description="how much there is of a resource, as NAME:COUNT, or NAME:COUNT:DEVICE for one device; default: "
            "as much as one instance needs at most; may be repeated"
        ),
    ] = ()
    backend_directory: Annotated[str, Meta(description="folder with backends: NAME/backend.py or NAME/model.py")] = ""
    backend_config: Annotated[
        tuple[Name, ...],
        Meta(description="a backend's setting, as BACKEND,KEY=VALUE, or KEY=VALUE for all; may be repeated"),
    ] = ()


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the server listens, and how it behaves towards clients."""

    id: Annotated[Name, Meta(description="the server's name in its KServe metadata")] = "penstock"
    host: Annotated[
        str,
        Meta(
            description="address to listen on; 0.0.0.0 for all; beyond this machine, it needs keys or --allow-anonymous"
        ),
    ] = "127.0.0.1"
    http_address: Annotated[str | None, Meta(description="another address for HTTP")] = None
    grpc_address: Annotated[str | None, Meta(description="another address for gRPC")] = None
    metrics_address: Annotated[str | None, Meta(description="another address for metrics")] = None
    http_port: Annotated[Port, Meta(description="OpenAI API, KServe v2 and health")] = 8000
    grpc_port: Annotated[Port, Meta(description="KServe v2 over gRPC, and the standard health service")] = 8001
    metrics_port: Annotated[
        Port,
        Meta(description="Prometheus metrics and the scheduler's state; without a key on this machine's addresses"),
    ] = 8002
    allow_http: Annotated[bool, Meta(description="listen for HTTP")] = True
    allow_http2: Annotated[bool, Meta(description="HTTP/2 on the HTTP port, beside HTTP/1.1")] = True
    allow_grpc: Annotated[bool, Meta(description="listen for gRPC")] = True
    allow_metrics: Annotated[bool, Meta(description="listen on the metrics port")] = True
    http_max_input_size: Annotated[
        Positive, Meta(description="bytes of a KServe request, decompressed; gRPC messages have the same limit")
    ] = 64 << 20
    strict_liveness: Annotated[
        bool,
        Meta(description="not live as soon as one language model is down for good; off: when no other model is left"),
    ] = False
    body_memory: Annotated[
        Positive, Meta(description="bytes of request bodies that may be in memory at one time, decompressed ones too")
    ] = 1 << 30
    stored_responses: Annotated[
        int, Meta(ge=0, description="responses that are kept, and conversations, and chats; 0: none")
    ] = 1000
    stored_responses_per_tenant: Annotated[
        Positive | None, Meta(description="of one key's tenant; default: stored-responses")
    ] = None
    stored_responses_memory: Annotated[
        Positive,
        Meta(description="bytes of responses, conversations, chats, each together; the longest unused goes first"),
    ] = 64 << 20
    stored_responses_memory_per_tenant: Annotated[
        Positive | None, Meta(description="of one key's tenant; default: stored-responses-memory")
    ] = None
    background_responses: Annotated[
        int, Meta(ge=0, description="responses that are being made in the background at one time; 0: none")
    ] = 100
    background_responses_per_tenant: Annotated[
        Positive | None, Meta(description="of one key's tenant; default: background-responses")
    ] = None
    max_loop_lag: Annotated[
        Seconds,
        Meta(description="while the server is so many seconds late with what is due, requests get 503; 0: never"),
    ] = 2.0
    body_timeout: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="seconds that the whole body of an HTTP request may take")
    ] = 600.0
    http_header_forward_pattern: Annotated[
        str, Meta(description="HTTP headers whose whole name matches this become request parameters")
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, Meta(description="gRPC metadata whose whole name matches this become request parameters")
    ] = ""
    allow_client_shm: Annotated[
        bool, Meta(description="clients on this machine may pass tensors through system shared memory")
    ] = False
    api_key: Annotated[
        tuple[Name, ...],
        Meta(
            description="accepted bearer keys for inference, metadata and metrics; each is a tenant of its own; "
            "default: no key is asked for"
        ),
    ] = ()
    admin_key: Annotated[
        tuple[Name, ...],
        Meta(description="accepted bearer keys that may also load and unload models and change settings"),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="a TOML file of keys with tenants, roles and limits, written by `penstock key new`; read again "
            "on SIGHUP"
        ),
    ] = None
    http_restricted_api: Annotated[
        tuple[str, ...],
        Meta(
            description="as API[,API]:HEADER=VALUE: requests to these KServe APIs need this header too; may be repeated"
        ),
    ] = ()
    grpc_restricted_protocol: Annotated[
        tuple[str, ...],
        Meta(description="the same over gRPC, where the header is triton-grpc-protocol-HEADER; may be repeated"),
    ] = ()
    allow_anonymous: Annotated[
        bool,
        Meta(description="other machines may use ports without a key: all where there are no keys, else /metrics"),
    ] = False
    allowed_hosts: Annotated[
        tuple[Name, ...],
        Meta(
            description="names by which clients may call a server without keys, besides localhost and its addresses; "
            "others are refused, since a web page may be behind them"
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[Name, ...],
        Meta(description="web pages of these origins may use the server, as http://localhost:3000; with keys also *"),
    ] = ()
    memory_limit: Annotated[
        str | Positive | None,
        Meta(
            description="what the language models may take together, as bytes, a size like 16GiB, or a share of free "
            "memory; a model that would not fit is not loaded; default: what is free"
        ),
    ] = None
    fronts: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Literal["auto"],
        Meta(
            description="processes that speak the protocols, all on the same ports; auto: one for every 8 cores, at "
            "least 1 and at most 8"
        ),
    ] = 1
    load_reports: Annotated[
        Literal["request", "text", "json", "bin"],
        Meta(
            description="answers to inferences carry the server's load for balancers (ORCA): request: those whose "
            "request asks; text, json, bin: all of them, in this form; over gRPC always as bin"
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
        Seconds,
        Meta(
            description="running streams get their new tokens at most this often; first tokens never wait; 0: each step"
        ),
    ] = 10.0
    clamp_max_tokens: Annotated[
        bool,
        Meta(
            description="requests for more tokens than the context leaves behind their prompt get what it leaves, for "
            "clients that always ask for much; off: they are refused with the number that would fit"
        ),
    ] = False
    keep_alive: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds that an idle HTTP connection stays open; more than proxies before the server have"),
    ] = 75.0
    heartbeat_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a token after which a stream of the OpenAI API gets an SSE comment, so that "
            "nothing on the way takes it for dead; 0: never"
        ),
    ] = 15.0
    resumable_streams: Annotated[
        Seconds,
        Meta(
            description="seconds for which a stream of chats or text completions goes on without its client, who gets "
            "the rest for Last-Event-ID; 0: it ends with its client"
        ),
    ] = 0.0
    send_timeout: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="seconds after which a client that does not read is cut off")
    ] = 60.0
    watchdog_timeout: Annotated[
        Annotated[float, Meta(ge=0.4)],
        Meta(
            description="seconds without progress after which the engine is replaced; a step that was expected to take "
            "long gets more"
        ),
    ] = 60.0
    ready_timeout: Annotated[
        Annotated[float, Meta(ge=0.2)] | None,
        Meta(
            description="seconds without progress of the engine after which the server is not ready; a step that was "
            "expected to take long gets more; default: 10, or half of watchdog-timeout where that is less"
        ),
    ] = None
    load_timeout: Annotated[
        Seconds, Meta(description="seconds after which an engine that is still loading its model is ended; 0: never")
    ] = 1800.0
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
    trace_config: Annotated[
        tuple[Name, ...],
        Meta(description="a setting of the request trace, as level=, rate=, count= or triton,file= and the like"),
    ] = ()
    metrics_config: Annotated[
        tuple[Name, ...],
        Meta(
            description="which latencies nv_* show: summary_latencies=, histogram_latencies= or counter_latencies= "
            "true or false, summary_quantiles=0.5:0.05,0.9:0.01; may be repeated"
        ),
    ] = ()

    def address(self, port: ListeningPort) -> str:
        """Where that port listens."""
        own: str | None = getattr(self, f"{port}_address")
        return own or self.host

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


class AccessLogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is told of each request, on standard error."""

    access_log: Annotated[
        Literal["text", "json", "off"],
        Meta(description="a line for each request that has ended, without its contents; probes have none"),
    ] = "text"
    access_log_sample: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="share of the good requests that get a line; those that fail always do"),
    ] = 1.0
    access_log_slow_s: Annotated[
        Seconds, Meta(description="of the good requests only those get a line that took so many seconds")
    ] = 0.0


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS of the HTTP port, under names like those of the gRPC port's."""

    http_use_ssl: Annotated[bool, Meta(description="TLS; needs a certificate and its key")] = False
    http_use_ssl_mutual: Annotated[bool, Meta(description="clients must show a certificate, too")] = False
    http_server_cert: Annotated[str, Meta(description="PEM file with the server's certificate")] = ""
    http_server_key: Annotated[str, Meta(description="PEM file with its private key")] = ""
    http_root_cert: Annotated[str, Meta(description="PEM file with the authority of clients' certificates")] = ""


class OpenTelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, for a collector."""

    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")] | None,
        Meta(
            description="URL of a collector that gets spans of requests by OTLP over HTTP, as http://localhost:4318; "
            "needs the extra [otel]; default: none"
        ),
    ] = None
    otlp_sample: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="share of the requests that get spans, of those that come without a traceparent"),
    ] = 1.0


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS, keepalive and compression of the gRPC port, under Triton's own flags."""

    grpc_transport: Annotated[
        Literal["penstock", "grpcio"],
        Meta(description="who speaks HTTP/2 on the gRPC port: this server itself, or the gRPC library"),
    ] = "penstock"
    grpc_use_ssl: Annotated[bool, Meta(description="TLS; needs a certificate and its key")] = False
    grpc_use_ssl_mutual: Annotated[bool, Meta(description="clients must show a certificate, too")] = False
    grpc_server_cert: Annotated[str, Meta(description="PEM file with the server's certificate")] = ""
    grpc_server_key: Annotated[str, Meta(description="PEM file with its private key")] = ""
    grpc_root_cert: Annotated[str, Meta(description="PEM file with the authority of clients' certificates")] = ""
    grpc_infer_response_compression_level: Annotated[
        Literal["none", "low", "medium", "high"], Meta(description="compression of inference responses")
    ] = "none"
    grpc_keepalive_time: Annotated[Positive, Meta(description="milliseconds of silence before a ping")] = 7_200_000
    grpc_keepalive_timeout: Annotated[Positive, Meta(description="milliseconds that its answer may take")] = 20_000
    grpc_keepalive_permit_without_calls: Annotated[bool, Meta(description="ping connections without calls")] = False
    grpc_http2_max_pings_without_data: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="pings in a row without data between them; 0: any number")
    ] = 2
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        Positive, Meta(description="milliseconds that clients must leave between pings without data")
    ] = 300_000
    grpc_http2_max_ping_strikes: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="pings too early before a connection is closed; 0: any number")
    ] = 2
    grpc_max_connection_age: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="milliseconds after which a connection is closed; 0: never")
    ] = 0
    grpc_max_connection_age_grace: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="milliseconds that its calls get then; 0: as long as they take")
    ] = 0


class SimulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated engine's latency model."""

    sim_step_ms: Annotated[Seconds, Meta(description="milliseconds per step")] = 0.0
    sim_prefill_us: Annotated[Seconds, Meta(description="microseconds per prompt token")] = 0.0
    sim_sequence_us: Annotated[Seconds, Meta(description="microseconds per sequence in a step")] = 0.0
    sim_faults: Annotated[
        str, Meta(description='faults by marker token in the prompt, e.g. "kill=7,slow=8:2.5"; for tests')
    ] = ""


class TrafficConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names that several models serve."""

    traffic: Annotated[
        tuple[TrafficRule, ...],
        Meta(
            description="a public name with its targets, their weights, a shadow and a shift, as a JSON object; a file "
            "has them as tables; may be repeated"
        ),
    ] = ()


class UpstreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Language models that other servers have."""

    upstream: Annotated[
        tuple[UpstreamSettings, ...],
        Meta(
            description="a model of a server with OpenAI's API, as NAME=URL or a JSON object with more settings; a "
            "file has them as tables; may be repeated"
        ),
    ] = ()
