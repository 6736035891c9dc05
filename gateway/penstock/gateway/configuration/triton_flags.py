"""Triton's flags: those that mean the same here, and those that have no counterpart, with the reason."""

from __future__ import annotations

from collections.abc import Iterable

_LOOP = "one event loop serves the port"
_CACHE = "the response caches are part of the server"
_GPU_MEMORY = "backends manage their own memory"
_HOST = "processes are placed by taskset or the container"
_GONE = "it was Triton's own older name; see --disable-auto-complete-config"
_TRACE = "it was Triton's own older name; see --trace-config"
_SAGEMAKER = "there is no SageMaker endpoint"
_VERTEX = "there is no Vertex AI endpoint"
_METRICS = "metrics are read when they are scraped"

TRITON_REFUSED: dict[str, str] = {
    "--http-thread-count": _LOOP,
    "--grpc-infer-thread-count": _LOOP,
    "--grpc-infer-allocation-pool-size": _LOOP,
    "--grpc-max-response-pool-size": "streams bound their unread responses themselves",
    "--reuse-http-port": "a port belongs to one server",
    "--reuse-grpc-port": "a port belongs to one server",
    "--allow-gpu-metrics": "nv_gpu_* are there where there are GPUs and the extra [gpu] is installed",
    "--allow-cpu-metrics": "nv_cpu_* are always there",
    "--metrics-interval-ms": _METRICS,
    "--log-file": "the log goes to stderr, for the shell or the service manager to write to a file",
    "--cache-directory": _CACHE,
    "--pinned-memory-pool-byte-size": _GPU_MEMORY,
    "--cuda-memory-pool-byte-size": _GPU_MEMORY,
    "--cuda-virtual-address-size": _GPU_MEMORY,
    "--min-supported-compute-capability": _GPU_MEMORY,
    "--model-load-gpu-limit": _GPU_MEMORY,
    "--enable-peer-access": _GPU_MEMORY,
    "--buffer-manager-thread-count": _GPU_MEMORY,
    "--host-policy": _HOST,
    "--repoagent-directory": "there are no repository agents",
    "--model-namespacing": "model names are unique over all repositories",
    "--strict-model-config": _GONE,
    **{f"--trace-{name}": _TRACE for name in ("file", "level", "rate", "count", "log-frequency")},
    "--allow-sagemaker": _SAGEMAKER,
    "--sagemaker-port": _SAGEMAKER,
    "--sagemaker-port-range": _SAGEMAKER,
    "--sagemaker-safe-port-range": _SAGEMAKER,
    "--sagemaker-thread-count": _SAGEMAKER,
    "--allow-vertex-ai": _VERTEX,
    "--vertex-ai-port": _VERTEX,
    "--vertex-ai-thread-count": _VERTEX,
    "--vertex-ai-default-model": _VERTEX,
}
"""The errors tell what to change in a start script."""
TRITON_SERVED = frozenset(
    "--" + name
    for name in (
        *("model-repository", "model-store", "exit-on-error", "disable-auto-complete-config", "strict-readiness"),
        *("model-control-mode", "repository-poll-secs", "load-model", "model-config-name", "model-load-thread-count"),
        *("model-load-retry-count", "id", "exit-timeout-secs", "allow-http", "http-address", "http-port"),
        *("http-header-forward-pattern", "http-max-input-size", "http-restricted-api", "allow-grpc", "grpc-address"),
        *("grpc-port", "grpc-header-forward-pattern", "grpc-restricted-protocol", "grpc-use-ssl"),
        *("grpc-use-ssl-mutual", "grpc-server-cert", "grpc-server-key", "grpc-root-cert"),
        *("grpc-infer-response-compression-level", "grpc-keepalive-time", "grpc-keepalive-timeout"),
        *("grpc-keepalive-permit-without-calls", "grpc-http2-max-pings-without-data"),
        *("grpc-http2-min-recv-ping-interval-without-data", "grpc-http2-max-ping-strikes"),
        *("grpc-max-connection-age", "grpc-max-connection-age-grace", "allow-metrics", "metrics-address"),
        *("metrics-port", "metrics-config", "log-verbose", "log-info", "log-warning", "log-error", "log-format"),
        *("trace-config", "cache-config", "response-cache-byte-size", "rate-limit", "rate-limit-resource"),
        *("allow-client-shm", "backend-directory", "backend-config"),
    )
)
"""Triton reads its command line by getopt_long, which takes the beginning of a name for it where only one begins so:
start scripts have --model-repo."""


def in_full(flag: str, known: Iterable[str]) -> str:
    """A flag of Triton's that may be abbreviated, where no other flag begins so; any other flag as it is. `known`: all
    flags that there are."""
    longer = {each for each in (*known, *TRITON_REFUSED) if each.startswith(flag)}
    one = next(iter(longer)) if len(longer) == 1 else flag
    return one if one in TRITON_SERVED or one in TRITON_REFUSED else flag
