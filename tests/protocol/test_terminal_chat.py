"""`penstock chat` against servers: in a pipe, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from support.fork import ForkedProcess, completed, filled_pipe
from support.server import ANY_PORTS, Server

CLOSED = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("--max-model-len", "512")
    try:
        yield server.wait_ready()
    finally:
        server.close()


class Scripted:
    """A server that sends prepared chunks, and keeps what it was asked. `held` are answers that never end."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.deltas: list[dict[str, Any]] = []
        self.finish: str | None = "stop"
        self.held = False
        self.keys: list[str | None] = []
        self.disconnected = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                scripted._answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.bodies.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        self.keys.append(handler.headers["Authorization"])
        handler.send_response(200)
        handler.end_headers()
        for delta in self.deltas:
            handler.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
        handler.wfile.flush()
        if self.held:
            handler.rfile.read(1)  # until the client goes
            self.disconnected.set()
        elif self.finish is not None:
            last = {"choices": [{"delta": {}, "finish_reason": self.finish}]}
            handler.wfile.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *command: str) -> None:
        main, child = pty.openpty()
        self.process = ForkedProcess(command, _environ(), streams=dict.fromkeys(range(3), child))
        os.close(child)
        self._main = main
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self._main, line.encode() + b"\n")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, pattern: str) -> None:
        """Python's `input` misses a Ctrl-C that comes between its prompt and its first look at the keyboard."""
        for _ in range(15):
            self.interrupt()
            with suppress(AssertionError):
                self.wait_for(pattern, seconds=2)
                return
        raise AssertionError(f"no {pattern!r} in {self.text!r}")

    def wait_for(self, pattern: str, seconds: float = 30) -> str:
        """What is shown until `pattern` is there; the text before it is used up."""
        ends = time.monotonic() + seconds
        while (match := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self._main], [], [], max(0, ends - time.monotonic()))
            data = b""
            if ready:
                with suppress(OSError):  # the other side is closed
                    data = os.read(self._main, 65536)
            if not data:
                raise AssertionError(f"no {pattern!r} in {self.text!r}")
            self.text += data.decode(errors="replace")
        found, self.text = self.text[: match.end()], self.text[match.end() :]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal() -> Iterator[Any]:
    made: list[Terminal] = []

    def start(*flags: str) -> Terminal:
        made.append(Terminal("chat", *flags))
        made[-1].wait_for("/clear forgets")
        made[-1].wait_for("> ")
        return made[-1]

    yield start
    for each in made:
        each.close()


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | {"TERM": "dumb"}


def piped(prompt: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return completed("chat", *flags, environ=_environ(), stdin=prompt)


def test_a_prompt_from_a_pipe_gets_one_answer(demo: Server) -> None:
    asked = {"model": "penstock-demo", "messages": [{"role": "user", "content": "What does os.path.join do?"}]}
    answer = demo.post("/v1/chat/completions", asked | {"temperature": 0, "max_tokens": 20}).json()
    result = piped("What does os.path.join do?", "--url", demo.url, "--temperature", "0", "--max-tokens", "20")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.rstrip("\n") == answer["choices"][0]["message"]["content"].rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", CLOSED), r"no server answers at http://127.0.0.1:9 \(.*\). Start one with: penstock serve"),
        (("--url", "ftp://x"), "ftp://x is no URL of a server, such as http://127.0.0.1:8000"),
        (("--url", "http://x:99999"), "http://x:99999 is no URL: its port is not a number from 0 to 65535"),
    ],
)
def test_errors_are_one_line(flags: tuple[str, ...], message: str) -> None:
    result = piped("hi", *flags)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(f"penstock chat: {message}\n", result.stderr)


def test_what_the_server_refuses(demo: Server) -> None:
    result = piped("hi", "--url", demo.url, "--model", "other")
    assert result.stderr == "penstock chat: 404 Not Found: The model `other` does not exist.\n"
    assert piped(" \n", "--url", demo.url).stderr == "penstock chat: there is no prompt on standard input\n"


def test_a_pipe_gets_no_thoughts_and_an_early_end_is_an_error(scripted: Scripted) -> None:
    scripted.deltas = [{"reasoning_content": "hm"}, {"content": "a\x1b[2Jb"}]
    result = piped("hi", "--url", scripted.url, "--model", "m", "--api-key", "k1")
    assert (result.returncode, result.stdout, scripted.keys) == (0, "a[2Jb\n", ["Bearer k1"])
    scripted.finish = None
    result = piped("hi", "--url", scripted.url, "--model", "m")
    assert (result.returncode, result.stdout) == (1, "a[2Jb\n")
    assert "before the answer was complete" in result.stderr


def test_a_conversation_on_a_terminal(scripted: Scripted, terminal: Any) -> None:
    scripted.deltas = [{"reasoning": "hm"}, {"content": "One"}]
    chat = terminal("--url", scripted.url, "--model", "m", "--system", "Be brief.")
    chat.type("first")
    assert "\x1b[2mhm\x1b[0m\r\nOne\r\n" in chat.wait_for("One\r\n> ")
    chat.type("second")
    chat.wait_for("One\r\n> ")
    system = {"role": "system", "content": "Be brief."}
    said = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "One"}]
    assert scripted.bodies[1]["messages"] == [system, *said, {"role": "user", "content": "second"}]
    chat.type("/clear")
    chat.wait_for("forgotten.*\r\n> ")
    chat.type("/system Rhyme.")
    chat.wait_for("system: Rhyme..*\r\n> ")
    chat.type("third")
    chat.wait_for("One\r\n> ")
    assert scripted.bodies[2]["messages"] == [
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "third"},
    ]
    chat.type("/exit")
    assert chat.process.wait(30) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(scripted: Scripted, terminal: Any) -> None:
    scripted.deltas, scripted.held = [{"content": "begun"}], True
    chat = terminal("--url", scripted.url, "--model", "m")
    chat.type("first")
    chat.wait_for("begun")
    chat.interrupt()
    chat.wait_for(r"\[stopped\].*\r\n> ")
    assert scripted.disconnected.wait(30)
    scripted.held = False
    chat.type("second")
    chat.wait_for("begun\r\n> ")
    assert scripted.bodies[1]["messages"][1] == {"role": "assistant", "content": "begun"}
    chat.interrupt_until("/exit or Ctrl-D ends.*\r\n> ")
    os.write(chat._main, b"\x04")
    assert chat.process.wait(30) == 0


def test_an_error_does_not_end_a_conversation(demo: Server, terminal: Any) -> None:
    chat = terminal("--url", demo.url, "--temperature", "0", "--max-tokens", "5")
    chat.type("word " * 600)
    chat.wait_for("400 Bad Request: .*maximum context length")
    chat.type("What does os.getcwd do?")
    chat.wait_for(r"\[the answer was cut at its most tokens\].*\r\n> ")


def test_a_server_on_a_terminal_shows_what_to_type() -> None:
    server = Terminal("serve", *ANY_PORTS, "--api-key", "k1", "--engine", "simulated", "--host", "0.0.0.0")
    try:
        url = re.search(r"penstock chat --url (\S+) --api-key KEY\r\n", server.wait_for("--api-key KEY\r\n"))
        curl = server.wait_for("curl .*\r\n")
        assert url is not None
        assert f"curl -N {url[1]}/v1/chat/completions" in curl
        assert "Authorization: Bearer KEY" in curl
        refused = piped("hi", "--url", url[1])
        assert refused.stderr.startswith("penstock chat: 401 Unauthorized: ")
        assert refused.stderr.endswith(" Pass a key with --api-key.\n")
        assert piped("hi", "--url", url[1], "--api-key", "k1", "--max-tokens", "3").returncode == 0
    finally:
        server.process.terminate()
        server.process.wait(30)
        server.close()


def test_a_reader_that_has_seen_enough(scripted: Scripted) -> None:
    """As in `penstock chat | head -c 1`. The answer is longer than what a pipe holds."""
    scripted.deltas = [{"content": "x" * 1000}] * 300
    command = ("chat", "--url", scripted.url, "--model", "m")
    with filled_pipe("List the functions of the random module.") as question:
        process = ForkedProcess(command, _environ(), stdout=True, streams={0: question})
    assert process.stdout is not None
    assert len(os.read(process.stdout.fileno(), 1)) == 1
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""
