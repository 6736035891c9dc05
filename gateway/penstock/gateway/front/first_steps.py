"""What to type when a server is ready."""

from __future__ import annotations

import json
import shlex

from penstock.gateway.front.addresses import ip_literal


def reachable_host(host: str) -> str:
    """Where this machine reaches a server that listens on `host`, which may mean all addresses."""
    address = ip_literal(host)
    if address is None or not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def first_steps(url: str, model: str, *, needs_key: bool) -> str:
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    curl = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    chat = ["penstock", "chat", "--url", url]
    if needs_key:
        curl += ["-H", "Authorization: Bearer KEY"]
        chat += ["--api-key", "KEY"]
    return f"try it:\n  {shlex.join(chat)}\n  {shlex.join([*curl, '-d', json.dumps(body)])}"
