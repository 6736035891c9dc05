"""Which client speaks which protocol."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import msgspec

from penstock.loadtest.clients.base import Client, ClientOptions
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

CLIENTS = {
    "openai-chat": partial(CompletionsClient, chat=True),
    "openai-completions": partial(CompletionsClient, chat=False),
}


def make_client(target: Target, *, keep_text: bool = False) -> Client:
    """Raises LoadTestError for an option that cannot be."""
    return CLIENTS[target.protocol](
        ClientOptions(
            url=target.url,
            model=target.model,
            api_key=target.api_key or os.environ.get("OPENAI_API_KEY"),
            stream=target.stream,
            ignore_eos=target.ignore_eos,
            extra=_extra(target.extra),
            headers=dict(_header(text) for text in target.header),
            timeout=target.request_timeout,
            keep_alive=target.keep_alive,
            verify_tls=target.verify_tls,
            input_tensor=target.input_tensor,
            batch_size=target.batch_size,
            keep_text=keep_text,
        )
    )


def _extra(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise LoadTestError(f"extra: not a JSON object: {error}") from None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise LoadTestError(f"header: {text!r} is not 'Name: value'")
    return name.strip(), value.strip()
