"""From the settings of a target to those of a client."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

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
        raise LoadTestError("extra: whether answers are streamed is said by --stream and --no-stream")
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
