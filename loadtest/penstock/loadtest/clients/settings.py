"""Clients by protocol, and their settings, made from those of a target."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any, cast

import msgspec

from penstock.loadtest.clients.base import Client, ClientOptions
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

CLIENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai-chat": ("openai", "CompletionsClient", {"chat": True}),
    "openai-completions": ("openai", "CompletionsClient", {"chat": False}),
    "openai-responses": ("responses", "ResponsesClient", {}),
    "openai-embeddings": ("embeddings", "EmbeddingsClient", {}),
    "kserve-generate": ("kserve_generate", "GenerateClient", {}),
    "kserve-grpc-stream": ("kserve_grpc", "GrpcStreamClient", {}),
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


_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Of a header: a token (RFC 9110, section 5.6.2)."""


def client_options(target: Target, *, keep_text: bool = False, seed: int = 0, defer: bool = False) -> ClientOptions:
    """Raises LoadTestError for a setting that cannot be."""
    key = target.api_key or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise LoadTestError("api-key: it has characters that a header cannot have")
    return ClientOptions(
        url=_base(target),
        model=target.model,
        api_key=key,
        stream=target.stream,
        ignore_eos=target.ignore_eos,
        end_mark=target.end_mark,
        extra=_extra(target.extra),
        headers=_headers(target.header),
        timeout=target.request_timeout,
        keep_alive=target.keep_alive,
        verify_tls=target.verify_tls,
        input_tensor=target.input_tensor,
        batch_size=target.batch_size,
        keep_text=keep_text,
        seed=seed,
        defer=defer,
    )


def _base(target: Target) -> str:
    """OpenAI's clients are given addresses that end with /v1; so may be this one."""
    return target.url.rstrip("/").removesuffix("/v1") if target.protocol.startswith("openai") else target.url


def _extra(text: str) -> dict[str, object]:
    try:
        extra = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise LoadTestError(f"extra: not a JSON object: {error}") from None
    if "stream" in extra:
        raise LoadTestError("extra: whether answers are streamed is set by --stream and --no-stream")
    return extra


def _headers(texts: tuple[str, ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        name = name.strip()
        if not colon or not _NAME.fullmatch(name) or not text.isprintable():
            raise LoadTestError(f"header: {text!r} is not 'Name: value'")
        if name.lower() in (known.lower() for known in headers):
            raise LoadTestError(f"header: {name} is given twice")
        headers[name] = value.strip()
    return headers
