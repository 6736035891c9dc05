"""Counting what a server does with schemas."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("jsonschema")

from benchmarks.commands import main

GROUPS = {
    "type": [{"description": "integers", "schema": {"type": "integer"}}],
    "const": [{"description": "one", "schema": {"const": 1}}, {"description": "long", "schema": {"const": "long"}}],
    "not": [{"description": "not", "schema": {"not": {}}}],
    "ref": [{"description": "elsewhere", "schema": {"$ref": "http://localhost:1234/integer.json"}}],
}


class Server(BaseHTTPRequestHandler):
    """Says 1.5 to integers and 1 to all others; `not` is refused, and what is `long` is cut off."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        schema = body["structured_outputs"]["json"]
        status = 400 if "not" in schema else 200
        text = "1.5" if schema.get("type") == "integer" else "1"
        reason = "length" if schema.get("const") == "long" else "stop"
        answer = json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_figures_of_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests, remotes = tmp_path / "tests" / "draft2020-12", tmp_path / "remotes"
    tests.mkdir(parents=True)
    remotes.mkdir()
    (remotes / "integer.json").write_text('{"type": "integer"}')
    for keyword, groups in GROUPS.items():
        (tests / f"{keyword}.json").write_text(json.dumps(groups))
    figures = tmp_path / "figures.json"
    assert main(["schemas", str(tmp_path), "--server", f"mine={url}", "--answers", "3", "--json", str(figures)]) == 0
    [found] = json.loads(figures.read_text())
    assert (found["compiled"], found["refused"], found["failed"]) == (4, {"not": 1}, {})
    assert found["answers"] == {"right": 6, "wrong": 3, "cut off": 3}
    assert {(one["keyword"], one["text"]) for one in found["wrong"]} == {("type", "1.5")}
    printed = capsys.readouterr().out
    assert "| mine | 5 | 4 | 1 | 0 |" in printed
    assert "| not | 1 | 1 |" in printed
