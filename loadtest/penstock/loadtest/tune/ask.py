"""Questions to a server that was started here, and orders."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.tune.params import configured

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LOAD_SECONDS = 600.0


def ask(url: str, *, timeout: float, body: Any = None, key: str | None = None) -> tuple[int, bytes]:
    """Status and body; 0 where nobody answers. With a body it is a POST of JSON."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else msgspec.json.encode(body)
    try:
        with _OPENER.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


def configure_model(base: str, model: str, fields: Mapping[str, int], key: str | None) -> None:
    """Loads a model of a repository again, with other fields of its configuration. Raises LoadTestError."""
    status, body = ask(f"{base}/v2/models/{model}/config", timeout=30.0, key=key)
    if status != 200:
        raise LoadTestError(f"{model}: no configuration (status {status}): {body[:200].decode('utf-8', 'replace')}")
    config = msgspec.json.encode(configured(msgspec.json.decode(body), fields)).decode()
    order = {"parameters": {"config": config}}
    status, body = ask(f"{base}/v2/repository/models/{model}/load", timeout=_LOAD_SECONDS, body=order, key=key)
    if status != 200:
        raise LoadTestError(f"{model}: not loaded (status {status}): {body[:300].decode('utf-8', 'replace')}")
