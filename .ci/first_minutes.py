"""A newcomer's first minutes: the commands and programs of README.md, as they stand there.

They run in a copy of the checkout, in the environment that the first of them makes, and on the ports that the README
names. curl fails where a server refuses.
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
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("Start", "Serve a real model", "Without a server")
NOT_HERE = {
    "pip install -e '.[test]'": "the tests' environment takes minutes: .ci/run makes it, and runs them",
    "serve Qwen/Qwen2.5-0.5B-Instruct": "the hub",
    "serve ./my-model-gptq-int4": "no such checkpoint: tests/unit/engines/openvino pack their own",
    "serve ./my-model-q8_0.gguf": "no such file: tests/protocol/test_server_gguf.py writes its own",
    "serve ./my-model-int4-ov": "no such folder: tests/protocol/test_server_exported.py exports its own",
    "--max-model-len 8192": "the demo model's context is 2048",
    "--engine vllm": "vLLM: .ci/vllm",
    "--lora legal=": "no such adapter: tests/protocol/test_lora.py makes its own",
    "--embedding-model search=": "no such model: .ci/real_weights has it",
}
"""What cannot run here, by words that are in it alone, and why."""
QUESTION = "What does os.path.join do?\n"
"""Typed where a command reads standard input."""
SERVES = re.compile(r"\bpenstock serve\b")
_PORTS = (8000, 8001, 8002)
_TIME_LIMIT = 300


def main() -> None:
    started = time.monotonic()
    left_out = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder))
        for part in PARTS:
            print(f"== {part}", flush=True)
            run_part(checkout, blocks(part), left_out)
        if checkout.has("torch"):
            sys.exit("torch is installed: the README says that it is not needed")
    if stale := NOT_HERE.keys() - left_out:
        sys.exit(f"README.md no longer has: {', '.join(sorted(stale))}")
    print(f"{time.monotonic() - started:.0f} s")


def blocks(part: str) -> list[tuple[str, str]]:
    """Language and text of each block of code below a heading."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if not found or {language for language, _ in found} - {"sh", "python"}:
        sys.exit(f"README.md, {part}: there have to be blocks of sh and python, and no others")
    return found


def run_part(checkout: "Checkout", found: list[tuple[str, str]], left_out: set[str]) -> None:
    """A server runs until the next one starts, which has the same ports, or until the end of the part. Blocks of Python
    in a row are one program."""
    with checkout.server() as start_server:
        for language, group in itertools.groupby(found, key=lambda block: block[0]):
            texts = [text for _, text in group]
            if language == "python":
                checkout.run(["python", "-c", "\n".join(texts)])
                continue
            for command in itertools.chain.from_iterable(map(commands, texts)):
                reasons = [words for words in NOT_HERE if words in command]
                left_out.update(reasons)
                if reasons:
                    print(f"-- not here ({NOT_HERE[reasons[0]]}): {command.strip()}", flush=True)
                elif SERVES.search(command):
                    start_server(command)
                else:
                    checkout.run(checkout.shell(command))


def commands(block: str) -> list[str]:
    """A block is one script; but each line that starts a server is one of its own."""
    return block.splitlines() if all(map(SERVES.search, block.splitlines())) else [block]


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

    @contextmanager
    def server(self) -> Iterator[Callable[[str], None]]:
        """Gives a function that starts a server, in place of the one before."""
        running = list[Server]()

        def start(command: str) -> None:
            while running:
                running.pop().stop()
            print(f"-- {command.strip()}", flush=True)
            running.append(Server(self.shell(command), self.root, self._environ))
            running[-1].wait_until_ready()

        try:
            yield start
        finally:
            while running:
                running.pop().stop()


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
