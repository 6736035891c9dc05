"""Which client speaks which protocol, and what each has no place for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from penstock.loadtest.clients.base import Client
from penstock.loadtest.clients.settings import client_options
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

CLIENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai-chat": ("openai", "CompletionsClient", {"chat": True}),
    "openai-completions": ("openai", "CompletionsClient", {"chat": False}),
    "openai-responses": ("responses", "ResponsesClient", {}),
    "openai-embeddings": ("embeddings", "EmbeddingsClient", {}),
    "kserve-generate": ("kserve_generate", "GenerateClient", {}),
    "kserve-grpc-stream": ("kserve_grpc_stream", "GrpcStreamClient", {}),
    "kserve-http": ("kserve_http", "InferClient", {"binary": False}),
    "kserve-http-binary": ("kserve_http", "InferClient", {"binary": True}),
    "kserve-grpc": ("kserve_grpc", "GrpcInferClient", {}),
}
"""Module, class and arguments. Loaded when asked for: numpy and gRPC cost more than the rest together."""
_TENSORS = frozenset({"kserve-http", "kserve-http-binary", "kserve-grpc"})
_BOTH_WAYS = frozenset({"openai-chat", "openai-completions", "openai-responses", "kserve-generate"})
"""Streamed or not."""
_END_MARKS = frozenset({"openai-chat", "openai-completions"})


def make_client(target: Target, *, keep_text: bool = False, seed: int = 0, defer: bool = False) -> Client:
    """`seed`: of the tensors that a client makes; `defer`: see ClientOptions. Raises LoadTestError for an option that
    cannot be."""
    protocol = target.protocol
    if target.input_tensor and protocol not in _TENSORS:
        raise LoadTestError(f"input-tensor: {protocol} has no tensors of its own choosing")
    if target.batch_size > 1 and protocol not in (*_TENSORS, "openai-embeddings"):
        raise LoadTestError(f"batch-size: a request of {protocol} is one prompt")
    if not target.end_mark and protocol not in _END_MARKS:
        raise LoadTestError(f"end-mark: streams of {protocol} have no [DONE]")
    if not target.stream and protocol not in _BOTH_WAYS:
        always = "is always streamed" if protocol == "kserve-grpc-stream" else "is never streamed"
        raise LoadTestError(f"stream: {protocol} {always}")
    module, name, arguments = CLIENTS[protocol]
    kind = getattr(import_module(f"penstock.loadtest.clients.{module}"), name)
    return cast(Client, kind(client_options(target, keep_text=keep_text, seed=seed, defer=defer), **arguments))
