"""The commands to try when a server is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from penstock.gateway.requests.addresses import ip_literal

Kind = Literal["chat", "completion", "embed", "token_embed", "classify"]
"""What a model does, as far as a first request depends on it."""

_REQUESTS: Mapping[Kind, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"stream": True, "messages": [{"role": "user", "content": "Hello"}]}),
    "completion": ("/v1/completions", {"stream": True, "prompt": "Hello"}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "token_embed": ("/pooling", {"input": "Hello"}),
    "classify": ("/v1/classify", {"input": "Hello"}),
}


def reachable_host(host: str) -> str:
    """Where this machine reaches a server that listens on `host`, which may mean all addresses."""
    address = ip_literal(host)
    if address is None or not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def first_steps(url: str, model: str, kind: Kind, *, needs_key: bool) -> str:
    path, body = _REQUESTS[kind]
    curl = ["curl", "-N", url + path, "-H", "Content-Type: application/json"]
    chat = ["penstock", "chat", "--url", url]
    if needs_key:
        curl += ["-H", "Authorization: Bearer KEY"]
        chat += ["--api-key", "KEY"]
    lines = [chat] if kind == "chat" else []
    lines.append([*curl, "-d", json.dumps({"model": model, **body})])
    return "\n  ".join(["try it:", *map(shlex.join, lines)])
