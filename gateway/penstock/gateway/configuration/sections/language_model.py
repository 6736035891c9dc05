"""Settings of a language model: what runs it, its memory, its scheduler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engines.scheduler import config as scheduler_config
from penstock.gateway.configuration.sections.types import (
    OWN,
    Bytes,
    File,
    Memory,
    Microseconds,
    Milliseconds,
    Name,
    Positive,
    Seconds,
    SomeAddress,
    SomeBytes,
    SomeFile,
    SomeFolder,
    SomeSeconds,
    shared,
)


class LanguageModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, run by which engine."""

    model: Annotated[
        str | None,
        OWN,
        Meta(description="a Hugging Face folder, a GGUF file or a hub id; without one, the built-in demo model"),
    ] = None
    revision: Annotated[Name | None, OWN, Meta(description="branch, tag or commit of a hub model; default: main")] = (
        None
    )
    sleep_idle_seconds: Annotated[
        Seconds,
        Meta(
            description="seconds without requests after which a model frees its memory; it is loaded again at the next "
            "request, which waits; 0: never"
        ),
    ] = 0.0
    served_model_name: Annotated[
        tuple[Name, ...],
        OWN,
        Meta(description="the names that clients use; metrics have the first; default: MODEL's name"),
    ] = ()
    engine: Annotated[
        Literal["auto", "openvino", "vllm", "tensorrt_llm", "torch", "simulated"],
        Meta(
            description="what runs the model; auto: vllm or torch with a GPU, torch where openvino lacks the "
            "architecture, else openvino; simulated needs no weights and makes tokens up"
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            extra={"metavar": "DEVICE"},
            description="cpu, cuda or cuda:N; auto: the GPU where the engine can use one",
            pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None, Meta(description="most tokens of a request, prompt and output; default: the model's own limit")
    ] = None
    dtype: Annotated[
        Literal["auto", "bf16", "f16", "f32"],
        shared("penstock", "embedding"),
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
            "int8 if the CPU has a kernel for this dtype, else dtype; int8: dtype=auto may become f32 for it; mixed: "
            "int8 in small steps and bf16 in large ones, for CPUs with AMX, with twice the memory for weights"
        ),
    ] = "auto"
    weights_cache: Annotated[
        Bytes,
        shared("penstock", "embedding"),
        Meta(description="bytes of quantized weights kept on disk for later starts; 0: none"),
    ] = 20 << 30
    kv_cache_dtype: Annotated[
        Literal["auto", "u8", "u8-u4", "u4", "fp8", "bf16", "f16", "f32"],
        shared("penstock", "embedding"),
        Meta(
            description="how keys and values are kept: u8, u4, and u8-u4 (keys in 8 bits, values in 4) by openvino, "
            "fp8 by vllm and tensorrt_llm"
        ),
    ] = "auto"
    threads: Annotated[
        Positive | None,
        shared("penstock", "foreign"),
        Meta(description="compute threads; default: by model size and cores"),
    ] = None
    cpus: Annotated[
        Name | None,
        shared("penstock", "foreign"),
        Meta(
            extra={"metavar": "LIST"}, description="CPUs that the engine's process runs on, as 0-15,32-47; default: all"
        ),
    ] = None
    numa_nodes: Annotated[
        Name | None,
        shared("penstock", "foreign"),
        Meta(
            extra={"metavar": "LIST"},
            description="NUMA nodes whose CPUs and memory the engine's process uses, as 0 or 0-1; auto: those of the "
            "socket with the most free memory; default: all",
        ),
    ] = None
    speculative_model: Annotated[
        Name | None,
        OWN,
        Meta(
            extra={"metavar": "MODEL"},
            description="openvino: a smaller model with the same vocabulary (a folder, a GGUF file or a hub id), or an "
            "EAGLE-3 head, that drafts next tokens, of which several are verified in a step; answers stay the same",
        ),
    ] = None
    chat_template: Annotated[
        File | None, Meta(description="file with a chat template to use instead of the model's own")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="how the chat template gets content parts: string: joined; openai: as a list; auto: as a list "
            "if the template loops over it"
        ),
    ] = "auto"
    special_tokens_in_content: Annotated[
        bool,
        Meta(description="the text of a special token in a chat message is that token; off: it is ordinary text"),
    ] = False
    tool_parser: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME"},
            description="finds tool calls in answers: a parser's name, none, or auto: by the chat template",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME"},
            description="finds reasoning in answers: a parser's name, none, or auto: by the chat template",
        ),
    ] = "auto"


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines a language model has, and what happens to a request when one of them dies."""

    replicas: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        Meta(
            description="engines of the same model, each a process with the model in its memory; they share the CPUs, "
            "or each has one of the numa-nodes; 0: none here, only those of replica-address"
        ),
    ] = 1
    replica_address: Annotated[
        tuple[SomeAddress, ...],
        Meta(description="engine-doors of other servers with the same model, whose engines are further replicas"),
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
            description="openvino, vllm on CPUs, simulated: how many of the replicas compute long prompts and hand the "
            "keys and values over to the others, which generate; 0: each computes its own prompts"
        ),
    ] = 0
    handover_bytes: Annotated[
        SomeBytes, Meta(description="most bytes of shared memory for what the prefill-replicas hand over")
    ] = 2 << 30
    handover_min_tokens: Annotated[
        Positive,
        Meta(description="a prompt with fewer tokens left to compute is computed by the replica that generates"),
    ] = 128
    resume: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="whether a stream continues when its engine dies; auto: with several replicas; on: with a "
            "single one, too, once it has been restarted; off: it ends with an error"
        ),
    ] = "auto"
    resume_wait: Annotated[
        Seconds, Meta(description="seconds that such a stream waits at most for an engine that can continue it")
    ] = 60.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of vllm and tensorrt_llm alone: several devices, quantized kernels, options of their own."""

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
        Name | None, Meta(description="vllm: the method, by vLLM's name; default: what the checkpoint says")
    ] = None
    engine_args: Annotated[
        str | dict[str, Any],
        Meta(
            extra={"metavar": "JSON"},
            description="more options of the engine itself, as a JSON object: fields of vLLM's EngineArgs, arguments "
            "of TensorRT-LLM's LLM",
        ),
    ] = {}


class DoorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine for several servers: others use this server's, or this one uses another server's."""

    engine_door: Annotated[
        SomeAddress | None,
        Meta(
            description="address at which other servers can use the engine of MODEL, as ipc:///PATH or "
            "tcp://HOST:PORT; default: none"
        ),
    ] = None
    engine_door_clients: Annotated[Positive, Meta(description="most servers that use it at one time")] = 64
    engine_address: Annotated[
        SomeAddress | None,
        Meta(description="the engine-door of another server, whose engine runs MODEL; no engine is started here"),
    ] = None
    engine_key: Annotated[
        SomeFile | None,
        Meta(description="file with the key that both sides share, made by `penstock key new --engine`; tcp needs one"),
    ] = None


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA adapters, each a model of its own for clients; on the openvino, vllm, tensorrt_llm and torch engines."""

    lora: Annotated[
        tuple[Name, ...],
        OWN,
        Meta(
            extra={"metavar": "NAME=DIR"},
            description="an adapter, as NAME=FOLDER with files in PEFT's format; may be repeated",
        ),
    ] = ()
    lora_directory: Annotated[
        SomeFolder | None,
        OWN,
        Meta(description="clients may load and unload adapters in this folder at run time; default: they may not"),
    ] = None
    max_loras: Annotated[Positive, Meta(description="adapters that may be loaded at the same time")] = 8
    max_lora_rank: Annotated[Positive, Meta(description="highest rank of an adapter")] = 16


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory for keys and values."""

    kv_cache_memory: Annotated[
        Memory | None,
        Meta(description="bytes, a size like 4GiB, or a share of free memory like 40%%; default: a bounded share"),
    ] = None
    num_kv_blocks: Annotated[Positive | None, Meta(description="the size as a number of blocks")] = None
    state_interval: Annotated[
        Positive | None,
        Meta(description="openvino, torch: tokens between checkpoints of recurrent states; default: by their size"),
    ] = None
    prefix_caching: Annotated[bool, Meta(description="reuse the keys and values of prompts with equal beginnings")] = (
        True
    )
    kv_offload_dir: Annotated[
        SomeFolder | None,
        Meta(
            description="openvino, vllm on CPUs, simulated: folder that keeps what the prefix cache evicts, also for "
            "later starts; default: none"
        ),
    ] = None
    kv_offload_bytes: Annotated[SomeBytes, Meta(description="most bytes of a model's blocks in kv-offload-dir")] = (
        10 << 30
    )
    kv_events: Annotated[
        SomeAddress | None,
        OWN,
        Meta(
            description="address, as tcp://127.0.0.1:5557, where routers learn which blocks the prefix cache has; "
            "every program that reaches it can read the tokens of all prompts; default: none"
        ),
    ] = None
    kv_events_replay: Annotated[
        SomeAddress | None,
        OWN,
        Meta(description="address where they can ask for events that they have missed; default: none"),
    ] = None
    kv_events_topic: Annotated[
        str | None,
        OWN,
        Meta(extra={"metavar": "NAME"}, description="topic of these events; default: kv@HOST@MODEL, as llm-d reads it"),
    ] = None


class SchedulingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests run next, and how many may wait."""

    scheduler: Annotated[
        Literal["auto", "penstock", "engine"],
        shared("penstock", "foreign"),
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
            "or max-num-seqs if that is more"
        ),
    ] = None
    itl_target_ms: Annotated[
        Milliseconds,
        Meta(
            description="target for the milliseconds between two tokens: while requests generate, prompts get only as "
            "much of a step as keeps it this short (while none generates: four times as long); 0: as much as "
            "max-num-batched-tokens allows"
        ),
    ] = 200.0
    steps_in_flight: Annotated[
        Positive, Meta(description="steps in progress at the same time, if the engine can; 1: one after the other")
    ] = 2
    speculative: Annotated[
        Literal["off", "ngram", "mtp"],
        shared("penstock", "foreign"),
        Meta(
            description="ngram: next tokens are guessed from the request's text so far (prompt lookup), and "
            "several are verified in a step; answers stay the same. mtp: the checkpoint's own layer for multi-token "
            "prediction guesses (openvino: MiMo, Qwen3.5, Qwen3-Next)"
        ),
    ] = "off"
    max_draft_tokens: Annotated[
        Positive, shared("penstock", "foreign"), Meta(description="most guesses verified in one step of a request")
    ] = 8
    policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        Meta(description="fcfs: by arrival; priority: lower first, with ageing; fair: by tokens served per tenant"),
    ] = "fcfs"
    ageing: Annotated[
        SomeSeconds, Meta(description="policy priority: seconds of waiting per priority level gained")
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


class SimulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated engine's latency model."""

    sim_step_ms: Annotated[Milliseconds, Meta(description="milliseconds per step")] = 0.0
    sim_prefill_us: Annotated[Microseconds, Meta(description="microseconds per prompt token")] = 0.0
    sim_sequence_us: Annotated[Microseconds, Meta(description="microseconds per sequence in a step")] = 0.0
    sim_faults: Annotated[
        str, Meta(description='faults by marker token in the prompt, e.g. "kill=7,slow=8:2.5"; for tests')
    ] = ""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one model."""

    model: Annotated[LanguageModelConfig, shared("penstock")] = LanguageModelConfig()
    replication: Annotated[ReplicaConfig, OWN] = ReplicaConfig()
    engine: Annotated[EngineConfig, shared("penstock")] = EngineConfig()
    door: Annotated[DoorConfig, OWN] = DoorConfig()
    adapters: Annotated[AdapterConfig, shared("penstock")] = AdapterConfig()
    cache: CacheConfig = CacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    simulated: SimulatedOptions = SimulatedOptions()
