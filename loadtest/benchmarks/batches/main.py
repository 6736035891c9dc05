"""A batch through kill -9, and chats beside it: `python loadtest/benchmarks batches [MODEL]`.

One chat after the other, with a pause between them, is asked for its first token: alone, then beside the batch. In the
middle of the batch the server is killed and started again. At the end every line has to have one result.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx

_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
_PAUSE_S = 0.15
_CHATS = 120
_NAMES = ("os.path.join", "len", "math.sqrt", "json.dumps", "re.sub", "sorted", "print", "random.choice")


def main(settings: Mapping[str, Any]) -> int:
    count = settings["lines"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = [*settings["model"], "--data-dir", folder]
        server = stack.enter_context(_Server(flags))
        alone = server.first_tokens(_CHATS)
        batch_id = server.start_batch(count)
        began = time.monotonic()
        beside = server.first_tokens(_CHATS)
        done = server.batch(batch_id)["request_counts"]
        while done["completed"] < count // 2:
            time.sleep(0.2)
            done = server.batch(batch_id)["request_counts"]
        server.kill()
        print(f"killed after {done['completed']} of {count} lines", flush=True)
        server = stack.enter_context(_Server(flags))
        again = server.first_tokens(_CHATS)
        while (batch := server.batch(batch_id))["status"] not in ("completed", "failed"):
            time.sleep(0.5)
        results = server.results(batch)
        names = [result["custom_id"] for result in results]
        print(f"{batch['status']} after {time.monotonic() - began:.0f} s, of which the server was away for some")
        print(f"{count} lines, {len(names)} results, {len(set(names))} different ones")
        for what, seconds in (("alone", alone), ("beside the batch", beside), ("beside it after the kill", again)):
            print(f"first token of a chat {what}: {_shown(seconds)}")
    return 0 if len(names) == len(set(names)) == count else 1


def _shown(seconds: Sequence[float]) -> str:
    cuts = statistics.quantiles(seconds, n=10)
    median, p90, mean = statistics.median(seconds) * 1e3, cuts[8] * 1e3, statistics.fmean(seconds) * 1e3
    return f"median {median:.1f} ms, p90 {p90:.1f} ms, mean {mean:.1f} ms"


class _Server:
    def __init__(self, flags: Sequence[str]) -> None:
        ports = ["--http-port", "0", "--no-allow-grpc", "--no-allow-metrics", "--access-log", "off"]
        command = [sys.executable, "-m", "penstock.gateway.cli", "serve", *flags, *ports]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        url = ""
        for line in self._process.stderr or ():
            match = _LISTENING.search(line)
            url = match[1] if match else url
            if "ready: " in line:
                break
        else:
            raise RuntimeError("the server ended")
        self._client = httpx.Client(base_url=url, timeout=60)
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()

    def first_tokens(self, count: int) -> list[float]:
        """Seconds, of chats one behind the other."""
        times = []
        for number in range(count):
            time.sleep(_PAUSE_S)
            body = self._chat(number) | {"stream": True, "max_tokens": 16}
            begin = time.perf_counter()
            first = None
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    if first is None and '"content":"' in line and '"content":""' not in line:
                        first = time.perf_counter() - begin
            if first is None:
                raise RuntimeError("a chat without an answer")
            times.append(first)
        return times

    def start_batch(self, count: int) -> str:
        lines = [
            {"custom_id": f"line {n}", "method": "POST", "url": "/v1/chat/completions", "body": self._chat(n)}
            for n in range(count)
        ]
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = self._client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self._client.post("/v1/batches", json=body).json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        batch: dict[str, Any] = self._client.get(f"/v1/batches/{batch_id}").json()
        return batch

    def results(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
        texts = [self._client.get(f"/v1/files/{file_id}/content").text for file_id in files]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def _chat(self, number: int) -> dict[str, Any]:
        question = f"What does {_NAMES[number % len(_NAMES)]} do?"
        messages = [{"role": "user", "content": question}]
        return {"model": self._model, "messages": messages, "max_tokens": 48, "seed": number}
