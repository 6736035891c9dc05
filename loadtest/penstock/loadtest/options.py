"""Everything that a load test can be told. `penstock.loadtest.commands` derives the flags from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.loadtest.errors import LoadTestError, UsageError

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9, extra={"unit": "s"})]
"""`extra` is for what makes flags of settings: texts may have units, and `metavar` is what the help calls a value."""
File = Annotated[str, Meta(extra={"metavar": "FILE"})]
Url = Annotated[str, Meta(extra={"metavar": "URL"})]
Key = Annotated[str, Meta(extra={"metavar": "KEY"})]
Name = Annotated[str, Meta(extra={"metavar": "NAME"})]
Json = Annotated[str, Meta(extra={"metavar": "JSON"})]

_Chosen = TypeVar("_Chosen")

PROTOCOLS = (
    "openai-chat",
    "openai-completions",
    "openai-responses",
    "openai-embeddings",
    "kserve-generate",
    "kserve-grpc-stream",
    "kserve-http",
    "kserve-http-binary",
    "kserve-grpc",
)


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server, and how to speak to it."""

    url: Annotated[Url, Meta(description="address of the server; for kserve-grpc and kserve-grpc-stream its gRPC port")]
    model: Annotated[
        Name, Meta(description="the model's name; default: the only one that the server has; gRPC needs a name")
    ] = ""
    protocol: Annotated[
        Literal[PROTOCOLS],  # type: ignore[valid-type]
        Meta(description="what is spoken"),
    ] = "openai-chat"
    stream: Annotated[bool, Meta(description="ask for streams where the protocol has both")] = True
    api_key: Annotated[Key | None, Meta(description="bearer key; default: the variable OPENAI_API_KEY")] = None
    header: Annotated[
        tuple[str, ...],
        Meta(extra={"metavar": "HEADER"}, description="'Name: value' for each request; may be repeated"),
    ] = ()
    extra: Annotated[Json, Meta(description="a JSON object merged into each request; null leaves a field out")] = "{}"
    ignore_eos: Annotated[
        bool, Meta(description="ask for exactly the output tokens; --no-ignore-eos for strict APIs")
    ] = True
    end_mark: Annotated[
        bool, Meta(description="openai: a stream must end with [DONE]; --no-end-mark for servers that never send it")
    ] = True
    keep_alive: Annotated[bool, Meta(description="use connections again")] = True
    verify_tls: Annotated[bool, Meta(description="check the server's certificate")] = True
    request_timeout: Annotated[Seconds, Meta(description="seconds for one request")] = 600.0
    input_tensor: Annotated[
        tuple[str, ...],
        Meta(
            extra={"metavar": "NAME:DATATYPE:SHAPE"},
            description="kserve infer: NAME:DATATYPE:1,3,224, an input with its whole shape; may be repeated, and then "
            "these inputs are all that is sent; default: those of the model's metadata. Their values are random, by "
            "--seed; every request is the same",
        ),
    ] = ()
    batch_size: Annotated[
        Positive, Meta(description="kserve infer: rows of each request; openai-embeddings: inputs of each request")
    ] = 1


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sent."""

    requests: Annotated[
        Positive | None, Meta(description="requests in the run; default: all of a file, as --duration allows, or 64")
    ] = None
    prompt_tokens: Annotated[Positive, Meta(description="tokens of a synthetic prompt")] = 128
    prompt_tokens_stddev: Annotated[Amount, Meta(description="spread of that, normal")] = 0.0
    output_tokens: Annotated[Positive, Meta(description="tokens to generate")] = 128
    output_tokens_stddev: Annotated[Amount, Meta(description="spread of that, normal")] = 0.0
    shared_prefix_tokens: Annotated[
        Count, Meta(description="tokens that prompts share, as a system prompt, before their own")
    ] = 0
    prefixes: Annotated[Positive, Meta(description="how many different shared prefixes there are")] = 1
    turns: Annotated[Positive, Meta(description="turns of a session; each has the conversation so far")] = 1
    turn_delay: Annotated[Seconds, Meta(description="seconds between an answer and the session's next turn")] = 0.0
    dataset: Annotated[
        File | None, Meta(description="prompts from a file: ShareGPT's JSON, or JSON lines with prompt or messages")
    ] = None
    trace: Annotated[
        File | None, Meta(description="arrivals and lengths from a trace: Mooncake JSONL, BurstGPT CSV, Azure CSV")
    ] = None
    trace_format: Annotated[
        Literal["auto", "mooncake", "burstgpt", "azure"], Meta(description="the trace's format; auto: by its fields")
    ] = "auto"
    trace_speed: Annotated[Annotated[float, Meta(gt=0, le=1e9)], Meta(description="2: twice as fast as recorded")] = 1.0
    trace_block: Annotated[Positive, Meta(description="Mooncake: tokens of the block that a hash id stands for")] = 512
    mix: Annotated[
        tuple[str, ...],
        Meta(
            description="a part of a mix, as 'WEIGHT NAME key=value ...', with these settings' names; may be repeated"
        ),
    ] = ()
    tokenizer: Annotated[
        File | None,
        Meta(description="folder or tokenizer.json that counts prompt tokens; default: by the server's usage"),
    ] = None
    token_ids: Annotated[
        bool, Meta(description="send synthetic prompts as token ids, where the protocol takes them; needs a tokenizer")
    ] = False
    seed: Annotated[int, Meta(description="equal seeds send equal requests at equal times")] = 0


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When it is sent."""

    concurrency: Annotated[Positive, Meta(description="closed loop: requests at a time")] = 8
    rate: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="open loop: requests per second, whatever the server does; with turns, sessions"),
    ] = None
    arrival: Annotated[
        Literal["constant", "poisson", "gamma"], Meta(description="open loop: how the times between requests spread")
    ] = "poisson"
    burstiness: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)], Meta(description="gamma: its shape; 1 is Poisson, less is burstier")
    ] = 1.0
    ramp: Annotated[Seconds, Meta(description="seconds over which concurrency or rate rise to their value")] = 0.0
    duration: Annotated[
        Seconds | None, Meta(description="seconds after which no request is begun; default: no limit")
    ] = None
    grace: Annotated[Seconds, Meta(description="seconds that running requests get then")] = 30.0
    max_in_flight: Annotated[Positive, Meta(description="open loop: most requests at a time")] = 10_000
    warmup: Annotated[Count, Meta(description="requests before the run, which do not count")] = 2
    repeat: Annotated[Positive, Meta(description="runs; figures are medians, with a confidence interval")] = 1
    processes: Annotated[Count, Meta(description="client processes; 0: as many as the load needs")] = 0
    goodput: Annotated[
        tuple[str, ...], Meta(description="a bound on good requests, as ttft:200, tpot:20, itl:50 or e2e:5000 (ms)")
    ] = ()
    metrics_url: Annotated[
        Url | None,
        Meta(
            description="the server's Prometheus page, read during the run; default: found by itself, 'none' for none"
        ),
    ] = None
    calibrate: Annotated[
        bool,
        Meta(description="first measure this client alone for a second: its latency, and how many tokens it can read"),
    ] = True


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several runs in a row: a sweep, a search for the highest load, or two servers side by side."""

    sweep: Annotated[
        str | None,
        Meta(
            description="a run for each value: concurrency=1,4,16 or rate=1:32:x2 (from, to, times 2; +2 adds); also "
            "batch_size, prompt_tokens and output_tokens; 30 s each unless --requests or --duration say otherwise"
        ),
    ] = None
    find: Annotated[
        Literal["rate", "concurrency"] | None,
        Meta(
            description="search the highest load that keeps the bounds of --slo, from --rate or --concurrency on; a "
            "rate without bounds: that the server keeps up with; 30 s a run, or --duration"
        ),
    ] = None
    slo: Annotated[
        tuple[str, ...],
        Meta(
            description="find: a bound, as ttft_p99:500 (ms; ttft, itl, tpot, e2e with p50, p90, p95, p99, max, mean), "
            "goodput:0.95 (least share), errors:0.01 (largest share, the default); may be repeated"
        ),
    ] = ()
    precision: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(
            description="find: ends when the highest load that held and the lowest that failed differ by at most this "
            "share"
        ),
    ] = 0.05
    max_runs: Annotated[Positive, Meta(description="find: most runs")] = 24
    vs: Annotated[
        Url | None,
        Meta(description="address of another server; both are measured in turn, by default 4 times, and compared"),
    ] = None
    vs_model: Annotated[Name, Meta(description="its model; default: the same")] = ""
    vs_label: Annotated[Name, Meta(description="what reports call it; default: its address")] = ""
    vs_extra: Annotated[Json | None, Meta(description="its --extra; default: the same")] = None
    vs_api_key: Annotated[Key | None, Meta(description="its key; default: the same")] = None


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written."""

    json: Annotated[File | None, Meta(description="write the report as JSON here; - for standard output")] = None
    markdown: Annotated[File | None, Meta(description="write it as Markdown here")] = None
    csv: Annotated[File | None, Meta(description="write one line for each request here")] = None
    html: Annotated[File | None, Meta(description="write a page with plots here")] = None
    vllm_json: Annotated[File | None, Meta(description="write the figures under vLLM bench's names here")] = None
    aiperf_json: Annotated[File | None, Meta(description="write the figures under AIPerf's names here")] = None
    label: Annotated[Name, Meta(description="what reports call this run; default: the model")] = ""
    live: Annotated[bool, Meta(description="show progress, on a terminal")] = True
    strict: Annotated[
        bool, Meta(description="exit with 3 when the figures cannot be trusted, 4 when requests failed")
    ] = False


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Target
    workload: WorkloadOptions = WorkloadOptions()
    load: LoadOptions = LoadOptions()
    search: SearchOptions = SearchOptions()
    output: OutputOptions = OutputOptions()

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent at given times, not when there is a free place."""
        return self.load.rate is not None or self.workload.trace is not None


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "target": Target,
    "workload": WorkloadOptions,
    "load": LoadOptions,
    "search": SearchOptions,
    "output": OutputOptions,
}
_SECTION_OF = {name: section for section, cls in SECTIONS.items() for name in cls.__struct_fields__}


def options(settings: Mapping[str, Any]) -> Options:
    """From settings by name, as text or as what they are. Raises UsageError, naming the setting."""
    if "url" not in settings:
        raise UsageError("url: which server? (--url http://127.0.0.1:8000)")
    tree: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        tree[_SECTION_OF[name]][name] = value
    return converted(tree, Options)


def converted(tree: Any, kind: type[_Chosen]) -> _Chosen:
    """Raises UsageError, naming the setting."""
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        raise UsageError(f"{where.rstrip('`').rpartition('.')[2].replace('_', '-')}: {problem}") from None


_WHOLE = frozenset({"openai-embeddings", "kserve-http", "kserve-http-binary", "kserve-grpc"})
"""Protocols whose answers always come at once."""
_OF_STREAMS = ("ttft", "itl", "tpot")


def is_streamed(target: Target) -> bool:
    return target.stream and target.protocol not in _WHOLE


def check_latencies(target: Target, names: Iterable[str], what: str) -> None:
    """`names`: latencies that the setting `what` bounds. Raises LoadTestError for those that a whole answer does not
    have: all of it comes at its end, which is e2e."""
    if is_streamed(target):
        return
    whose = f"{target.protocol} has" if target.protocol in _WHOLE else "answers that are not streamed have"
    for name in names:
        if name in _OF_STREAMS:
            raise LoadTestError(f"{what}: {whose} no {name}, only e2e")
