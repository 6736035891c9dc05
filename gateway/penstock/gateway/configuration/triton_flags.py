"""Triton's flags that have no counterpart here, and why: the errors tell what to change in a start script."""

from __future__ import annotations

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
