"""A drill with the console alone: which tenant floods, which request is stuck and why, which model fails to load, and
traffic that is shifted back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.conftest import keyed_server, use_key, wait_js
from support.server import Server

Open = Callable[..., Any]
Keep = Callable[[Any, str], None]
_RULE = {
    "targets": [{"model": "echo"}, {"model": "echo-new", "weight": 0}],
    "shift": {"to": "echo-new", "steps": [{"percent": 50, "seconds": 600}, {"percent": 100, "seconds": 600}]},
}


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    seats = ("--max-num-seqs", "8", "--num-kv-blocks", "400", "--load-model", "echo-new")
    with keyed_server(repository, tmp_path_factory.mktemp("keys"), *seats) as running:
        yield running


@contextmanager
def chats(server: Server, tenant: str, number: int, id_: str = "") -> Iterator[list[str]]:
    """So many long streams of a tenant, whose last events are noted."""
    last: list[str] = []
    leaving = threading.Event()

    def chat(place: int) -> None:
        headers = {"authorization": f"Bearer {tenant}"} | ({"x-request-id": id_} if id_ else {})
        message = {"role": "user", "content": f"{tenant} {place} " + "words " * 60}
        body = {"model": "penstock-demo", "messages": [message], "max_tokens": 1500, "ignore_eos": True, "stream": True}
        line = ""
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                if leaving.is_set():
                    return
                if line.startswith('data: {"error"'):
                    break
        last.append(line or str(answer.status_code))

    threads = [threading.Thread(target=chat, args=(place,), daemon=True) for place in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield last
    finally:
        leaving.set()
        for thread in threads:
            thread.join(60)


def test_which_tenant_floods_and_which_request_is_stuck_and_why(open_page: Open, server: Server, picture: Keep) -> None:
    page = open_page(server.url, "live", color_scheme="dark")
    use_key(page, "admin")
    with chats(server, "blue", 24):
        tenants = page.get_by_role("region", name="Requests by tenant")
        tenants.locator("tr", has_text="blue").get_by_text("24", exact=True).first.wait_for()
        page.get_by_text("waits for").first.wait_for()
        with chats(server, "red", 1, "red-is-stuck") as last:
            rows = page.get_by_role("region", name="Requests in flight")
            stuck = rows.locator("tr", has_text="red-is-stuck")
            stuck.get_by_text("waits for a place in the batch").wait_for()
            first, second = (tenants.locator("tbody tr").nth(place).inner_text() for place in (0, 1))
            assert first.startswith("blue")
            assert second.startswith("red")
            assert int(first.split("\t")[1]) == 24
            page.wait_for_timeout(4000)  # for the plots of the picture
            picture(page, "live")
            stuck.get_by_role("link").click()
            page.get_by_role("heading", name="Request red-is-stuck").wait_for()
            page.get_by_role("region", name="Time by stage").get_by_text("queue").wait_for()
            page.get_by_role("button", name="Cancel this request").click()
            page.get_by_role("button", name="Cancel it").click()
            page.get_by_text("cancelled (cancelled)").wait_for()
            wait_js(page, "document.getElementById('announce').textContent === 'The request is cancelled.'")
            deadline = threading.Event()
            for _ in range(500):
                if last:
                    break
                deadline.wait(0.02)
            assert "cancelled by an operator" in last[0]


def test_where_the_time_of_a_request_has_gone(open_page: Open, server: Server, picture: Keep) -> None:
    page = open_page(server.url, "request")
    use_key(page, "admin")
    page.locator("#status", has_text="ready").wait_for()
    page.get_by_role("heading", name="Choose a request").wait_for()
    wait_js(page, "!document.querySelector('#status').textContent.includes('no access')")
    page.wait_for_timeout(1500)
    headers = {"authorization": "Bearer red", "x-request-id": "red-waterfall"}
    message = {"role": "user", "content": "a long prompt " * 300}
    body = {"model": "penstock-demo", "messages": [message], "max_tokens": 60, "ignore_eos": True}
    assert httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
    page.get_by_role("link", name="red-waterfall").click()
    table = page.get_by_role("region", name="Time by stage")
    for part in ("chat template", "tokenizing", "queue", "prompt, part 1", "decoding: 60 tokens"):
        table.get_by_text(part).first.wait_for()
    page.get_by_text("ok, status 200").wait_for()
    picture(page, "request")


def test_which_model_fails_to_load(open_page: Open, server: Server, picture: Keep) -> None:
    page = open_page(server.url, "overview")
    use_key(page, "admin")
    page.locator("#status", has_text="ready").wait_for()
    page.goto(server.url + "/console#/tensors")
    page.get_by_label("Model", exact=True).last.fill("broken")
    page.get_by_role("button", name="Load or reload").click()
    page.get_by_role("button", name="Load it").click()
    page.locator("p.bad[role=alert]", has_text="broken").wait_for()
    page.goto(server.url + "/console#/overview")
    row = page.locator("tr", has_text="broken")
    row.get_by_text("unavailable").wait_for()
    assert "model.onnx" in row.inner_text() or "onnx" in row.inner_text().lower()
    picture(page, "overview")


def test_traffic_is_shifted_back(open_page: Open, server: Server, picture: Keep) -> None:
    admin = {"authorization": "Bearer admin"}
    assert httpx.put(server.url + "/traffic/ranker", json=_RULE, headers=admin).status_code == 200
    tensors = [
        {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        {"name": "IMAGE", "datatype": "FP32", "shape": [3, 2, 2], "data": [0] * 12},
    ]
    for _ in range(8):  # a shift begins with the first request
        answer = httpx.post(server.url + "/v2/models/ranker/infer", json={"inputs": tensors}, headers=admin)
        assert answer.status_code == 200
    page = open_page(server.url, "tensors")
    use_key(page, "admin")
    page.get_by_role("heading", name="ranker").wait_for()
    page.get_by_text("running, 50 %").wait_for()
    page.get_by_role("button", name="Shift back").click()
    page.get_by_role("dialog").get_by_text("echo-new gets none").wait_for()
    page.get_by_role("button", name="Set it").click()
    page.locator("#announce", has_text="shifted back").wait_for(state="attached")
    page.goto(server.url + "/console#/overview")
    targets = page.get_by_role("region", name="Traffic rules")
    targets.locator("tr", has_text="echo-new").get_by_text("0.0 %").wait_for()
    page.get_by_text("ranker: rule set: echo 1, echo-new 0").first.wait_for()
    picture(page, "traffic")
    rule = httpx.get(server.url + "/traffic/ranker", headers=admin).json()
    assert {target["target"]: target["share"] for target in rule["targets"]} == {"echo": 1.0, "echo-new": 0.0}
