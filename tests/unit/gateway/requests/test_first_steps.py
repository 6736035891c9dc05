"""What a server shows on a terminal when it is ready: lines that can be typed."""

from __future__ import annotations

import json
import shlex

import pytest

from penstock.gateway.requests.first_steps import Kind, first_steps

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("chat", "/v1/chat/completions", "messages"),
        ("completion", "/v1/completions", "prompt"),
        ("embed", "/v1/embeddings", "input"),
        ("token_embed", "/pooling", "input"),
        ("classify", "/v1/classify", "input"),
    ],
)
def test_the_curl_line_fits_the_model(kind: Kind, path: str, field: str) -> None:
    lines = first_steps(URL, "it's a model", kind, needs_key=True).splitlines()[1:]
    curl = shlex.split(lines[-1])
    assert curl[:3] == ["curl", "-N", URL + path]
    body = json.loads(curl[-1])
    assert body["model"] == "it's a model"
    assert field in body
    assert all("KEY" in line for line in lines)
    assert [shlex.split(line)[:2] for line in lines[:-1]] == ([["penstock", "chat"]] if kind == "chat" else [])
