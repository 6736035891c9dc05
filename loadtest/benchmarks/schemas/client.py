"""Asks a server for JSON."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    seconds: float
    text: str
    """Or why there is none."""
    complete: bool = False


class Client:
    def __init__(self, url: str, model: str, timeout: float) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        self._timeout = timeout

    def ask(self, schema: Any, max_tokens: int, seed: int) -> Answer:
        """What the model draws of its own distribution."""
        body = {
            "model": self._model,
            "prompt": "A value: ",
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "structured_outputs": {"json": schema if isinstance(schema, dict) else json.dumps(schema)},
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer none"}
        )
        begin = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            return Answer(error.code, time.perf_counter() - begin, error.read().decode(errors="replace"))
        except OSError as error:
            return Answer(0, time.perf_counter() - begin, str(error))
        seconds = time.perf_counter() - begin
        [choice] = json.loads(content)["choices"]
        return Answer(200, seconds, choice["text"], choice["finish_reason"] == "stop")
