"""A tokenizer with more tokens than the model has embeddings: text that needs one of them is refused, no step fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from support.dataplane import Setup
from support.kserve import FakeModelStore
from support.kserve_http import kserve_context

FOREIGN, KNOWN = "the world", "x"
"""The last token of the one is the first that the model lacks; the other has none of those."""


class Served:
    def __init__(self, folder: Path) -> None:
        tokenizer = Setup(folder / "whole", SchedulerConfig(), 64).tokenizer
        self.limit = max(tokenizer.encode(FOREIGN, False))
        assert max(tokenizer.encode(f"user: {KNOWN}\n", True)) < self.limit
        self.setup = Setup(folder / "cut", SchedulerConfig(), 64, vocab_size=self.limit)
        model: Any = LanguageModel(self.setup.plane, self.setup.model, "m", policy="fcfs")
        self.app = build_app(self.setup.plane, AppSettings(), kserve_context(FakeModelStore(model)))

    @property
    def message(self) -> str:
        return f"The prompt has the token {self.limit}, but the model's vocabulary ends at {self.limit - 1}."

    async def ask(self, path: str, text: str, **fields: Any) -> AsgiCall:
        body: dict[str, Any] = {"model": "m", "max_tokens": 3, **fields}
        if path == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": text}]
        elif path == "/v1/completions":
            body["prompt"] = text
        elif path.endswith("/infer"):
            body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}]}
        else:
            body = {"text_input": text}
        return await call(self.app, path, body)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await served.setup.engine.start()
    served.setup.model.loaded = True
    yield served
    served.setup.engine.core.check_integrity()
    assert served.setup.engine.stats.step_failures == 0
    await served.setup.engine.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_refuse_a_text_with_one_and_answer_others(served: Served, stream: bool) -> None:
    refused = await served.ask("/v1/completions", FOREIGN, stream=stream)
    assert (refused.status, refused.json()["error"]["message"]) == (400, served.message)
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert (await served.ask("/v1/completions", KNOWN, stream=stream)).status == 200


async def test_chats_refuse_a_message_with_one_and_answer_others(served: Served) -> None:
    refused = await served.ask("/v1/chat/completions", FOREIGN)
    error = refused.json()["error"]
    assert (refused.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("Token ids must be in 0..")
    assert (await served.ask("/v1/chat/completions", KNOWN)).status == 200


@pytest.mark.parametrize("verb", ["infer", "generate", "generate_stream"])
async def test_every_verb_of_kserve_refuses_a_text_with_one_and_answers_others(served: Served, verb: str) -> None:
    refused = await served.ask(f"/v2/models/m/{verb}", FOREIGN)
    assert (refused.status, refused.json()) == (400, {"error": served.message})
    assert (await served.ask(f"/v2/models/m/{verb}", KNOWN)).status == 200


async def test_one_of_several_prompts(served: Served) -> None:
    refused = await call(served.app, "/v1/completions", {"model": "m", "prompt": [KNOWN, FOREIGN], "max_tokens": 3})
    assert (refused.status, refused.json()["error"]["message"]) == (400, served.message)
