"""The commands and programs that README and docs show, run as they stand there.

python .ci/first_minutes.py                      README.md, in the environment that its first command makes
python .ci/first_minutes.py docs/*.md ...        these pages, in the environment of this Python

They run in a copy of the checkout, and on the ports that the pages name. curl fails where a server refuses. Comments
before a block say what differs:

    <!-- not run: REASON -->            the whole block
    <!-- not run, "WORDS": REASON -->   its lines with these words
    <!-- first: COMMAND -->             run before the block: files that the reader has
    <!-- no server -->                  none runs beside the block
"""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = {"sh", "bash", "console", "python"}
DEFAULT_SERVER = "penstock serve"
"""Runs for pages that ask a server and start none."""
QUESTION = "What does os.path.join do?\n"
"""Typed where a command reads standard input."""
SERVES = re.compile(r"\bpenstock serve\b")
ASKS = re.compile(r"(127\.0\.0\.1|localhost):800")
BLOCK = re.compile(
    r"^(?P<comments>(?: *<!-- [^\n]* -->\n)*) *```(?P<language>\w*)\n(?P<text>.*?)^ *```", re.DOTALL | re.MULTILINE
)
NOT_RUN = re.compile(r'<!-- not run(?:, "(?P<words>.+?)")?: (?P<reason>.+) -->')
FIRST = re.compile(r"<!-- first: (.+) -->")
_PORTS = (8000, 8001, 8002)
_TIME_LIMIT = 300


@dataclass(frozen=True)
class Block:
    """A block of code. `left_out` has reasons, by words of the lines that they are for; "" for all of it."""

    language: str
    text: str
    left_out: dict[str, str]
    first: tuple[str, ...]
    alone: bool


def main() -> None:
    started = time.monotonic()
    names = sys.argv[1:]
    pages = {name: blocks(name) for name in names or ["README.md"]}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder))
        try:
            for name in sorted(pages, key=lambda name: starts_server(pages[name])):  # the others share one
                print(f"== {name}", flush=True)
                run_page(checkout, pages[name])
        finally:
            checkout.stop_server()
        if not names and checkout.has("torch"):
            sys.exit("torch is installed: the README says that it is not needed")
    print(f"{time.monotonic() - started:.0f} s")


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer((ROOT / page).read_text()):
        if match["language"] not in LANGUAGES:
            continue
        text = textwrap.dedent(match["text"])
        left_out = {m["words"] or "": m["reason"] for m in NOT_RUN.finditer(match["comments"])}
        if stale := [words for words in left_out if words not in text]:
            sys.exit(f"{page}: no line of the block has {', '.join(stale)}")
        first = tuple(FIRST.findall(match["comments"]))
        found.append(Block(match["language"], text, left_out, first, "<!-- no server -->" in match["comments"]))
    return found


def starts_server(page: list[Block]) -> bool:
    return any(SERVES.search(script) for block in page for script in scripts(block))


def run_page(checkout: "Checkout", page: list[Block]) -> None:
    """A server runs until the next one starts, which has the same ports. Blocks of Python in a row are one program."""
    if starts_server(page):
        checkout.stop_server()
    for language, group in itertools.groupby(page, key=lambda block: block.language):
        programs = list[str]()
        for block in group:
            if block.alone:
                checkout.stop_server()
            for command in block.first:
                checkout.run(checkout.shell(command))
            for words, reason in block.left_out.items():
                print(f"-- not here ({reason}): {words or block.text.strip()}", flush=True)
            programs += scripts(block)
        if language == "python":
            programs = ["\n".join(programs)] if programs else []
        for script in programs:
            if language != "python" and SERVES.search(script):
                checkout.start_server(script)
                continue
            if ASKS.search(script):
                checkout.ensure_server()
            checkout.run(["python", "-c", script] if language == "python" else checkout.shell(script))


def scripts(block: Block) -> Iterator[str]:
    """What runs of a block, in parts: one ends with each line that starts a server."""
    if "" in block.left_out:
        return
    if block.language == "python":
        yield block.text
        return
    script = list[str]()
    for command in commands(block):
        if any(words in command for words in block.left_out):
            continue
        script.append(command)
        if SERVES.search(command):
            yield "\n".join(script)
            script = []
    if script:
        yield "\n".join(script)


def commands(block: Block) -> Iterator[str]:
    """Lines; one goes on behind a backslash and inside quotes. Of a console those behind the prompt."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    command = ""
    for line in lines:
        command += line
        if command.endswith("\\") or re.sub(r"\\.|#.*", "", command, flags=re.MULTILINE).count("'") % 2:
            command += "\n"
        elif command.strip():
            yield command
            command = ""


class Checkout:
    """A copy of this checkout, with the files that the README's reader has."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "penstock"
        ignored = shutil.ignore_patterns(".*_cache", ".git", ".hypothesis", ".venv", "__pycache__")
        shutil.copytree(ROOT, self.root, ignore=ignored, symlinks=True)
        (self.root / "my-model").symlink_to("gateway/penstock/gateway/demo_model")
        shutil.copytree(self.root / "examples/model_repository/add_sub", self.root / "models/add_sub")
        (self.root / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        path = f"{self.root}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._server: Server | None = None
        self._environ = os.environ | {"PATH": path, "CURL_HOME": str(self.root), "PIP_QUIET": "1"}

    def has(self, package: str) -> bool:
        return any((self.root / ".venv/lib").glob(f"python*/site-packages/{package}"))

    @staticmethod
    def shell(command: str) -> list[str]:
        return ["bash", "-e", "-o", "pipefail", "-c", command]

    def run(self, command: list[str]) -> None:
        print(f"-- {command[-1].strip()}", flush=True)
        done = subprocess.run(command, cwd=self.root, env=self._environ, input=QUESTION, text=True, timeout=_TIME_LIMIT)
        if done.returncode != 0:
            sys.exit(f"exit status {done.returncode} of: {command[-1]}")

    def start_server(self, command: str) -> None:
        """In place of the one before."""
        self.stop_server()
        print(f"-- {command.strip()}", flush=True)
        self._server = Server(self.shell(command), self.root, self._environ)
        self._server.wait_until_ready()

    def ensure_server(self) -> None:
        if self._server is None:
            self.start_server(DEFAULT_SERVER)

    def stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None


class Server:
    """`penstock serve`, and what comes before it in a command. Its log is printed."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        for port in _PORTS:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    sys.exit(f"port {port} is in use: the README's commands need it")
        self._process = subprocess.Popen(
            command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._ready = False
        self._wake = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            print(line, end="", flush=True)
            if " ready: " in line:
                self._ready = True
                self._wake.set()
        self._wake.set()

    def wait_until_ready(self) -> None:
        started = time.monotonic()
        self._wake.wait(_TIME_LIMIT)
        if not self._ready:
            self.stop()
            sys.exit("the server was not ready")
        while not _answers_ready():  # the log has a line for each model
            if time.monotonic() - started > _TIME_LIMIT:
                self.stop()
                sys.exit("/health/ready did not become 200")
            time.sleep(0.1)
        print(f"ready after {time.monotonic() - started:.1f} s", flush=True)

    def stop(self) -> None:
        """Ends the shell and what it has started, and waits for all of them."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._reader.join(60)
        self._process.wait(60)


def _answers_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{_PORTS[0]}/health/ready", timeout=10):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
