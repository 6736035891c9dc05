"""Streams whose clients lose their connection and come back for the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.gateway.requests.access import key_digest
from support.server import Server, serving, wait_until

CHAT = {"model": "penstock-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}
TEXT = {"model": "penstock-demo", "prompt": "hello", "max_tokens": 60}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "text": ("/v1/completions", TEXT)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [
        f'[[key]]\nsha256 = "{key_digest(f"{name}-key".encode()).hex()}"\ntenant = "{name}"' for name in ("one", "two")
    ]
    keys.write_text("\n".join(entries))
    with serving(
        "--engine", "simulated", "--resumable-streams", "60", "--sim-step-ms", "10", "--api-key-file", str(keys)
    ) as running:
        yield running


def read(
    server: Server, path: str, body: dict[str, Any], last: str | None = None, most: int | None = None, key: str = "one"
) -> tuple[int, list[tuple[str, str]]]:
    """The status, and (id, data) of the events up to so many."""
    headers = {"authorization": f"Bearer {key}-key"} | ({} if last is None else {"last-event-id": last})
    asked = body | {"stream": True, "temperature": 0}
    with httpx.stream("POST", server.url + path, json=asked, headers=headers, timeout=30) as response:
        if response.status_code != 200:
            return response.status_code, [("", response.read().decode())]
        events, event_id = [], ""
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                events.append((event_id, line[6:]))
                if len(events) == most:
                    break
        return 200, events


@pytest.mark.parametrize("kind", PATHS)
def test_a_client_gets_the_rest(server: Server, kind: str) -> None:
    path, body = PATHS[kind]
    _, whole = read(server, path, body)
    assert whole[-1][1] == "[DONE]"
    _, first = read(server, path, body, most=7)
    _, again = read(server, path, body, last=first[-1][0], most=5)
    status, rest = read(server, path, body, last=again[-1][0])
    assert status == 200
    found = first + again + rest
    assert len({event_id for event_id, _ in found}) == len(found)
    assert "".join(map(_text, found)) == "".join(map(_text, whole))
    assert '"finish_reason":"length"' in found[-2][1]
    assert len({data[:60] for _, data in found[:-1]}) == 1, "one answer, with one id"


def _text(event: tuple[str, str]) -> str:
    if event[1] == "[DONE]":
        return ""
    [choice] = json.loads(event[1])["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def test_the_end_can_be_had_again(server: Server) -> None:
    path, body = PATHS["text"]
    _, whole = read(server, path, body)
    assert read(server, path, body, last=whole[-3][0])[1] == whole[-2:]


def test_only_its_owner_gets_it_and_only_for_the_same_request(server: Server) -> None:
    path, body = PATHS["text"]
    _, [_, (last, _)] = read(server, path, body, most=2)
    assert read(server, path, body, last=last, key="two")[0] == 404
    stream = last.rpartition("-")[0]
    for last_id, changes, error in (
        (last, {"max_tokens": 3}, "it is the id of another request's stream"),
        (f"{stream}-99999", {}, "the last event has number"),
        (f"{stream}-x", {}, "this is not an event of the stream"),
    ):
        status, [(_, refusal)] = read(server, path, body | changes, last=last_id)
        assert (status, f"Last-Event-ID: {error}" in refusal) == (400, True), refusal
    assert read(server, path, body, last="no-1")[0] == 404
    assert read(server, path, body, last=last)[0] == 200


def test_a_refusal_is_a_status(server: Server) -> None:
    body = {**TEXT, "max_tokens": 10_000_000, "min_tokens": 10_000_000}
    status, [(_, refusal)] = read(server, *PATHS["text"][:1], body)
    assert (status, "maximum context length is" in refusal) == (400, True), refusal


def test_a_stream_nobody_comes_back_for_ends() -> None:
    path, body = PATHS["text"]
    with serving("--engine", "simulated", "--resumable-streams", "0.2", "--sim-step-ms", "10") as server:
        _, events = read(server, path, body | {"max_tokens": 1900}, most=2)
        wait_until(lambda: server.state()["finished"].get("abort") == 1)
        wait_until(lambda: read(server, path, body | {"max_tokens": 1900}, last=events[-1][0])[0] == 404)
