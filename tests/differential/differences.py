"""The one table of what differs from Triton 2.51, and why; docs/kserve.md shows it to users.

Anything else that differs fails the suite, and so does a row that no longer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ANY: Final = object()
"""Any value."""
MISSING: Final = "<missing>"
"""No value: the answer has no such member."""


@dataclass(frozen=True)
class Shown:
    """Where a difference shows: `cases` are patterns of case names; `fields` has, for patterns of paths in an answer,
    Triton's value and ours, in which text is a pattern, too."""

    cases: tuple[str, ...]
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Difference:
    """A row of the table in docs/kserve.md."""

    id: str
    what: str
    triton: str
    ours: str
    why: str
    shown: tuple[Shown, ...] = ()
    """Empty for what cannot be compared: Triton does not answer, or models are needed that only one server has."""


def at(*cases: str, **fields: tuple[Any, Any]) -> Shown:
    """`_` stands for `.` in the names of fields, `any` for all of them."""
    return Shown(cases, {"*" if key == "any" else key.replace("_", "."): value for key, value in fields.items()})


def served(*cases: str, status: int = 400) -> Shown:
    return at(*cases, status=(status, 200), any=(ANY, ANY))


def refused(*cases: str) -> Shown:
    return at(*cases, status=(200, 400), any=(ANY, ANY))


def fault(*cases: str) -> Shown:
    return at(*cases, status=(500, 400), body_error=(ANY, ANY))


def worded(*cases: str) -> Shown:
    return at(*cases, body_error=(ANY, ANY))


def detailed(*cases: str) -> Shown:
    return at(*cases, details=(ANY, ANY))


REQUESTS = (
    Difference(
        "malformed",
        "a malformed request: not JSON, a wrong type",
        "mostly 500",
        "400",
        "the caller is to blame",
        (
            fault("http: generate*: not JSON", "http: generate*: an array", "http: generate*: empty"),
            fault("http: generate: another type", "http: generate: id is a number"),
            fault("http: infer, *INT64, too large", "http: infer, INT32, a f*", "http: infer, BOOL, integers"),
            fault("http: parameters, timeout is text", "http: parameters, priority is negative"),
            fault("http: parameters, sequence_start is a number"),
            fault("http: trace: not JSON", "http: logging: no boolean"),
            at("http: logging: an unknown format", status=(503, 400), body_error=(ANY, ANY)),
            at("http: parameters, sequence id of 129 letters", status=(501, 400)),
        ),
    ),
    Difference(
        "integer-range",
        "an integer that its datatype cannot hold",
        "wraps around",
        "400",
        "a silent change of the data",
        (
            refused(
                *(f"http: infer, {name}, too large" for name in ("UINT8", "UINT16", "UINT32", "INT8", "INT16", "INT32"))
            ),
            at("grpc: contents, out of range", code=(MISSING, "INVALID_ARGUMENT"), any=(ANY, ANY)),
        ),
    ),
    Difference(
        "float-range",
        "`NaN`, `Infinity` and numbers beyond FP32 in JSON",
        "served",
        "400; binary data takes them",
        "JSON has no such numbers, and a number that becomes infinite is a silent change",
        (
            at(
                "http: hostile, data: not a number",
                "http: hostile, data: beyond float",
                refused=(MISSING, True),
                any=(ANY, ANY),
            ),
        ),
    ),
    Difference(
        "float-json",
        "such floats in a JSON answer",
        "`NaN`, `Infinity`",
        "null",
        "clients' parsers refuse the others",
        (at("http: infer, floats that are not numbers", body=("*NaN,Infinity*", "*null,null*")),),
    ),
    Difference(
        "null",
        "null for the `id`, `parameters` or `outputs` of an inference request",
        "500",
        "as if it was not there",
        "clients that write every field of a schema write null for what they do not use",
        (served("http: null: id", "http: null: parameters", "http: null: outputs", status=500),),
    ),
    Difference(
        "half-json",
        "FP16 and BF16 in JSON",
        "400",
        "served",
        "no reason to reject it",
        (served("http: infer, FP16, JSON", "http: infer, FP16 to JSON"),),
    ),
    Difference(
        "bytes-json",
        "BYTES that are not UTF-8, in a JSON answer",
        "as they are: no valid JSON",
        "400: ask for binary data",
        "clients cannot parse it",
        (refused("http: binary, strings that are not text to JSON"),),
    ),
    Difference(
        "twice",
        "an output that is asked for twice",
        "taken once",
        "400",
        "it is a mistake",
        (refused("http: error, output twice"),),
    ),
    Difference(
        "lax",
        "`parameters` of an input that is not an object; a signed `Inference-Header-Content-Length`",
        "ignored; taken",
        "400",
        "they are mistakes",
        (
            at(
                "http: hostile, input: parameters is text",
                "http: hostile, binary: header length '+200'",
                refused=(MISSING, True),
                any=(ANY, ANY),
            ),
        ),
    ),
    Difference(
        "raw-too-many",
        "more `raw_input_contents` than inputs",
        "ignored",
        "INVALID_ARGUMENT",
        "data would be lost",
        (at("grpc: infer, raw too many", code=(MISSING, "INVALID_ARGUMENT"), any=(ANY, ANY)),),
    ),
    Difference(
        "raw-bytes",
        "raw binary requests of a BYTES input",
        "only for shape [1]",
        "one string for any shape of one element",
        "it is unambiguous",
        (served("http: raw binary"),),
    ),
    Difference(
        "binary-default",
        "`binary_data_output` with listed outputs",
        "does not count for them",
        "counts for those that do not say otherwise",
        "as the extension specifies",
        (
            at(
                "http: binary, all but one",
                type=("application/json", "application/octet-stream"),
                body=(ANY, ANY),
                binary=(MISSING, ANY),
            ),
        ),
    ),
    Difference(
        "versions",
        "version 0 and versions with leading zeros",
        "not found; taken",
        "400",
        "they are no versions",
        (
            at("http: error, version zero", status=(404, 400), body_error=(ANY, ANY)),
            at("grpc: infer, version zero", code=("NOT_FOUND", "INVALID_ARGUMENT"), details=(ANY, ANY)),
            refused("http: GET /v2/models/add_sub/versions/01", "http: error, version 01"),
        ),
    ),
    Difference(
        "forwarded",
        "forwarded HTTP headers",
        "named as the caller wrote them; not for `generate`",
        "named in lower case; for all requests",
        "names of headers have no case",
        (
            at("http: parameters, from headers", "http: parameters, a reserved header", body=("*-Seen*", "*-seen*")),
            at("http: parameters, header and body", body=("*X-Seen*", ANY)),
            at("http: generate: a header", body=(ANY, "*x-seen*")),
        ),
    ),
    Difference(
        "percent",
        "a percent-encoded name in a path",
        "taken literally",
        "decoded",
        "RFC 3986",
        (served("http: GET /v2/models/add%5Fsub", status=404),),
    ),
    Difference(
        "deadly",
        "dimensions beyond 2^62; classes of a BYTES output",
        "end the server's process",
        "400",
        "one request must not end the others'",
    ),
    Difference(
        "optional-missing",
        "a required input is missing beside optional ones that are there",
        "may reach the model",
        "400",
        "the model cannot know better",
        (at("tritonclient.grpc: stream", **{"4_error": ("*KeyError*", "*missing required input(s) ?'N'?*")}),),
    ),
    Difference(
        "compression",
        "compression",
        "an unknown encoding is 501; a stream that is cut off is taken",
        "415; 400",
        "they are the caller's mistakes",
        (
            at("http: compression, unknown", status=(501, 415), body_error=(ANY, ANY)),
            refused("http: compression, cut off"),
        ),
    ),
)
ANSWERS = (
    Difference(
        "order",
        "the order of outputs",
        "the model's",
        "the request's, where it lists them",
        "callers get what they asked for",
        (
            at("http: infer, outputs in another order", body=(ANY, ANY)),
            at("model calls models: plain", body_outputs_0_data_0=(ANY, ANY)),
        ),
    ),
    Difference(
        "digits",
        "the last digit of floats in JSON",
        "one of several",
        "the shortest that is exact",
        "the same number",
        (at("http: infer, floats", "http: infer, FP32", body=(ANY, ANY)),),
    ),
    Difference(
        "wording",
        "the wording of errors",
        "",
        "the same where clients match on it; elsewhere our own",
        "Triton's names its parser's functions, and its order of inputs is that of a hash table",
        (
            worded("http: infer, no batch dimension", "http: infer, batches differ", "http: infer, STRING as BYTES"),
            worded("http: raw binary, too short", "http: raw binary, two inputs", "http: compression, garbage"),
            worded("http: parameters, an object", "http: parameters, an array", "http: parameters, null"),
            worded("http: generate: a parameter that is *", "http: error, input unknown", "http: error, input twice"),
            worded("http: error, version too large", "http: no inputs, and one comes"),
            detailed("grpc: *: no version", "grpc: infer, no version", "grpc: infer, version minus two"),
            detailed("grpc: contents, too few", "grpc: infer, input unknown", "grpc: infer, input twice"),
            detailed(
                "grpc: infer, negative shape",
                "grpc: infer, enormous shape",
                "grpc: infer, no datatype",
                "grpc: infer, raw too short",
            ),
            detailed("grpc: infer, raw too long", "grpc: infer, timeout is text", "grpc: infer, priority is negative"),
            detailed("grpc: infer, sequence id is a boolean"),
            Shown(("stream: wrong version",), {"0.error_message": (ANY, ANY)}),
            at("tritonclient.*: shared memory", **{"2_error": (ANY, ANY), "4_error": (ANY, ANY)}),
        ),
    ),
    Difference(
        "no-inputs-batched",
        "a Python model without inputs whose `max_batch_size` is above 0",
        "refuses every request",
        "serves them, each as a batch of one",
        "Triton's backend looks for the batch size in the first input",
        (served("http: no inputs, in batches"),),
    ),
    Difference(
        "unknown-outputs",
        "a model's answer with none of the outputs of its configuration",
        "200 without outputs",
        "500, with the names",
        "the model is broken, and its results would be lost in silence",
        (
            at("http: model's error: unknown output*", status=(200, 500), any=(ANY, ANY)),
            at("grpc: infer, model's error: unknown output", code=(MISSING, "INTERNAL"), any=(ANY, ANY)),
        ),
    ),
    Difference(
        "traceback",
        "an exception of a Python model",
        "its text, and where in the files of the server it was raised",
        "its text, and at load its line in the model's file; the traceback is in the log",
        "callers need not know the server's files",
        (
            worded("http: model's error: raise*"),
            detailed("grpc: infer, model's error: raise*"),
            at(
                "repository: index",
                **{
                    "*_reason": (
                        "Internal: ValueError*At:*",
                        "Internal: ValueError: it cannot be initialised (line 5 of model.py)",
                    )
                },
            ),
        ),
    ),
    Difference(
        "identity",
        "the server's metadata",
        "`triton`, 2.51.0; `cuda_shared_memory`",
        "`--id`, our version, and what we have",
        "clients look there for what they can use",
        (
            at(
                "http: GET /v2",
                body_name=("triton", "penstock"),
                body_version=("2.51.0", ANY),
                body_extensions=(ANY, ANY),
            ),
            at("grpc: server metadata", name=("triton", "penstock"), version=("2.51.0", ANY), extensions=(ANY, ANY)),
        ),
    ),
    Difference(
        "openai-routes",
        "a path outside `/v2` that does not exist",
        "404 with a text",
        "404 in the OpenAI API's shape, with method, path and the likely path",
        "the port is that of the OpenAI API, too",
        (at("http: GET /nothing", body_error=("Not Found", ANY)),),
    ),
    Difference(
        "shared-memory",
        "a shared memory key that cannot be opened, or is too small for the output",
        "500",
        "400",
        "the caller is to blame",
        (
            at("http: shared memory: no such key", status=(500, 400)),
            at("grpc: shared memory: no such key", code=("INTERNAL", "INVALID_ARGUMENT")),
            at("tritonclient.http: shared memory", **{"2_status": ("500", "400")}),
            at(
                "tritonclient.grpc: shared memory",
                **{"2_status": ("StatusCode.INTERNAL", "StatusCode.INVALID_ARGUMENT")},
            ),
        ),
    ),
    Difference(
        "client-shm",
        "client shared memory",
        "on (off in newer versions)",
        "off unless `--allow-client-shm`",
        "it opens the machine's memory to callers",
    ),
    Difference(
        "settings",
        "unknown trace or log settings, or values",
        "ignored",
        "400",
        "a typing error would go unnoticed",
        (refused("http: trace: an unknown *", "http: logging: an unknown key"),),
    ),
    Difference(
        "health-body",
        "the body of health and readiness",
        "empty",
        '`{"live": true}`, `{"ready": true}`, with a model\'s `name`',
        "KServe's clients read it; `curl` and others that send no `Accept-Encoding` get none, since Triton's scripts"
        " compare all that it prints",
        (
            at(
                "http: GET /v2/health/live",
                *("http: GET /v2/models/add_sub/ready", "http: GET /v2/models/add_sub/versions/1/ready"),
                body=("", ANY),
                type=("text/plain", "application/json"),
            ),
            at("http: GET /v2/health/ready", any=(ANY, ANY)),  # models are broken there: both say 400
        ),
    ),
    Difference(
        "health-watch",
        "`grpc.health.v1` Watch, server reflection",
        "unimplemented",
        "served",
        "tools use them",
        (at("grpc: health, Watch", code=("UNIMPLEMENTED", MISSING), any=(ANY, ANY)),),
    ),
)
GENERATE = (
    Difference(
        "generate-one",
        "`generate` on a model with many responses or none",
        "200 with an error in the body",
        "400; the model's error, if it has one",
        "a client sees it by the status",
        (
            refused("http: generate: no response", "http: generate: three responses"),
            at("http: generate: an error later", status=(200, 503), any=(ANY, ANY)),
            at("http: generate: an error first", status=(400, 503), body_error=(ANY, "it broke")),
        ),
    ),
    Difference(
        "generate-error",
        "a model's error as the first response to `generate` and `generate_stream`",
        "always 400; of a stream as an event",
        "the error's own status; no stream",
        "a client sees it by the status",
        (
            at("http: generate: an error of the model", status=(400, 404)),
            at("http: generate_stream: an error of the model", status=(400, 404), body=("data: *", ANY)),
            at("http: generate_stream: an error first", status=(400, 503), body=("data: *", ANY)),
        ),
    ),
    Difference(
        "generate-tensors",
        "nested arrays in `generate`; parameters called `triton_...`",
        "400; passed to the model",
        "served; 400",
        "as `infer` does",
        (served("http: generate: nested arrays"), refused("http: generate: a reserved parameter")),
    ),
)
MODELS = (
    Difference(
        "leaving",
        "a client that leaves during `infer` or `generate`",
        "not noticed",
        "the request is cancelled",
        "no client waits for the answer",
    ),
    Difference(
        "batch-exception",
        "an exception of a batch of a Python model",
        "fails the whole batch",
        "the batch's requests are executed one by one; only the guilty one fails",
        "callers in one batch do not know each other",
    ),
    Difference(
        "no-response",
        "a Python model that returns None for a request",
        "the client waits for ever",
        "500",
        "every request has an end",
    ),
    Difference(
        "called-errors",
        "an error of a model that a Python model calls",
        "INTERNAL; left out of decoupled responses",
        "its own code, with the model's name; a response with an error",
        "the caller can tell them apart",
        (
            Shown(
                tuple(
                    f"model calls models: {name}"
                    for name in ("unknown", "unknown_version", "wrong", "failing", "decoupled_unary")
                ),
                {"body.outputs.0.data.0": ("error INTERNAL *", "error *")},
            ),
            at("model calls models: decoupled_failing", body_outputs_0_data_0=("*'INDEX'*", "*UNAVAILABLE it broke*")),
        ),
    ),
    Difference(
        "timeouts",
        "a request's `timeout` where `allow_timeout_override` is set and the model has no timeout",
        "does not count",
        "counts",
        "it is what the caller asked for",
        (at("queue: timeout where the model has none", order=("abc", "ac"), answers_1=(200, ANY)),),
    ),
    Difference(
        "custom-batching",
        "custom batching (`TRITON_BATCH_STRATEGY_PATH`)",
        "a C library; a request that it never includes waits for ever",
        "a Python file, a library is refused; such a request goes alone",
        "what the library does can be written in a few lines, without a compiler",
    ),
    Difference(
        "batch-output",
        "an output of `batch_output` with too few or too many elements",
        "reads past its end; drops the rest",
        "an error",
        "callers must not get memory of others, or a part as the whole",
    ),
    Difference(
        "llm-infer",
        "`infer` on a decoupled language model without `stream`",
        "refused",
        "served",
        "it has exactly one response",
    ),
)
REPOSITORY = (
    Difference(
        "load-unknown",
        "loading an unknown model",
        "500",
        "404",
        "the caller is to blame",
        (
            at("grpc: load: unknown model", code=("INTERNAL", "NOT_FOUND")),
            at("repository: loads that fail", **{"0_status": (500, 404)}),
            at("repository: any file", **{"9_status": (500, 404)}),
        ),
    ),
    Difference(
        "load-faults",
        "a load with a bad configuration, file or parameter",
        "500 `failed to poll from model repository`; base64 of any quality",
        "400 with what is wrong",
        "the caller can mend it",
        (
            at(
                "repository: loads that fail",
                **{f"{step}_status": (500, 400) for step in (2, 3, 4, 6, 8, 11)},
                **{f"{step}_body_error": (ANY, ANY) for step in (2, 3, 4, 5, 6, 7, 8, 11)},
            ),
            at(
                "repository: any file",
                **{f"{step}_status": (500, 400) for step in range(2, 7)},
                **{
                    f"{step}_body_error": ("failed to load 'brought', *", "failed to load 'brought', *")
                    for step in range(2, 7)
                },
            ),
        ),
    ),
    Difference(
        "load-again",
        "a load without parameters after one with a configuration and no files",
        "changes nothing",
        "loads what the repository has",
        "there is no other way back",
        (at("repository: some fields of a configuration", **{"9_inputs": (ANY, ANY), "9_outputs": (ANY, ANY)}),),
    ),
    Difference(
        "named-repository",
        "the index of a named repository",
        "the index of all",
        "501",
        "naming repositories is not supported, as for loading",
        (at("repository: loads that fail", **{"10_status": (200, 501), "10_*": (ANY, ANY)}),),
    ),
    Difference(
        "index-broken",
        "a model whose configuration cannot be read, in the index",
        "its name",
        "UNAVAILABLE, with the reason",
        "the reason is what one looks for",
        (at("repository: index", **{"*_state": (MISSING, "UNAVAILABLE"), "*_reason": (MISSING, ANY)}),),
    ),
)
COUNTS = (
    Difference(
        "count-rejected",
        "requests that a full queue refuses",
        "not counted",
        "counted as failures, `REJECTED`",
        "they are what one watches for",
        (
            Shown(
                ("counts: a full queue",),
                {"0.inference_stats.fail": (MISSING, ANY), "1.nv_inference_request_failure *REJECTED*": (MISSING, 1)},
            ),
        ),
    ),
    Difference(
        "count-exceptions",
        "requests that end with an exception of a Python model",
        "counted as successes",
        "counted as failures",
        "they failed",
        (
            Shown(
                ("counts: errors of the model",),
                {
                    "0.inference_count": (2, 1),
                    "0.inference_stats.fail.count": (1, 2),
                    "0.inference_stats.*.count": (2, 1),
                    "1.nv_inference_request_success *": (2, 1),
                    "1.nv_inference_request_failure *BACKEND*": (1, 2),
                    "1.nv_inference_count *": (2, 1),
                },
            ),
        ),
    ),
    Difference(
        "count-ensemble-errors",
        "a request to an ensemble that fails",
        "counted twice",
        "counted once",
        "it is one request",
        (
            Shown(
                ("counts: an ensemble, errors",),
                {"0.inference_stats.fail.count": (2, 1), "1.nv_inference_request_failure *OTHER*": (2, 1)},
            ),
        ),
    ),
    Difference(
        "ensemble-config",
        "the configuration of an ensemble",
        "without `max_inflight_requests`",
        "with it",
        "newer versions have it",
        (
            Shown(
                ("http: GET /v2/models/ensemble*/config",),
                {"body.ensemble_scheduling.max_inflight_requests": (MISSING, 0)},
            ),
        ),
    ),
    Difference(
        "response-stats",
        "`response_stats` of Python models",
        "empty",
        "counted",
        "the field is there",
        (Shown(("counts: a stream*", "batching: counts of streams"), {"0.response_stats": (MISSING, ANY)}),),
    ),
    Difference(
        "cache-key",
        "the response cache and requests that ask for other outputs, with other parameters, or of a sequence",
        "get the answer to the first request",
        "are computed, and kept beside it unless they are of a sequence",
        "they are answers to another question",
        (
            at("cache: all outputs, then one", "cache: one output, then all", "cache: a sequence", any=(ANY, ANY)),
            at("cache: parameters", any=(0, 1)),
        ),
    ),
    Difference(
        "cache-errors",
        "an error of a Python model that has a response cache",
        "is kept, and given again",
        "is not kept",
        "the next time it may work",
        (at("cache: errors", any=(0, 1)),),
    ),
    Difference(
        "count-iterative",
        "a request that is executed again and again (`iterative_sequence`)",
        "each execution counts as a request, and the end as a cancelled one",
        "counts as one request",
        "it is one request",
        (
            Shown(
                ("sequence: counts, iterative",),
                {
                    "0.response_stats": (MISSING, ANY),
                    "0.inference_count": (4, 1),
                    "0.inference_stats.fail": (ANY, MISSING),
                    "0.inference_stats.*.count": (4, 1),
                    "1.nv_inference_request_success *": (4, 1),
                    "1.nv_inference_request_failure *CANCELED*": (1, MISSING),
                    "1.nv_inference_count *": (4, 1),
                },
            ),
        ),
    ),
    Difference(
        "sequence-idle",
        "`max_sequence_idle_microseconds`",
        "counts from the arrival of a sequence's last request",
        "counts from its last execution",
        "a slow answer must not end the sequence it belongs to",
    ),
    Difference(
        "sequence-text",
        "a text as `sequence_id`, and `CONTROL_SEQUENCE_CORRID`",
        "400 from a Python model if TYPE_STRING; anything if an integer",
        "the text; 400",
        "the model must not get another id than the client sent",
    ),
    Difference(
        "families",
        "metrics",
        "`nv_pinned_memory_pool_*`",
        "none of those; `nv_model_load_duration_secs`, as newer versions have",
        "there is no such pool",
        (
            Shown(
                ("metrics: families",),
                {"nv_pinned_memory_pool_*": ("gauge", MISSING), "nv_model_load_duration_secs": (MISSING, "gauge")},
            ),
        ),
    ),
    Difference(
        "counter-latencies",
        "`--metrics-config counter_latencies=false`",
        "all counters stay at 0",
        "counters of requests and inferences count on",
        "the setting is about latencies",
    ),
)

DIFFERENCES: tuple[Difference, ...] = (*REQUESTS, *ANSWERS, *GENERATE, *MODELS, *REPOSITORY, *COUNTS)
