"""The engine over the stand-in of TensorRT-LLM."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import support.tensorrt_llm as stand_in
from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import SamplingParams

CONFIG = {
    "vocab_size": stand_in.VOCAB_SIZE,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder that looks like a model from the outside."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fetcher:
    """Fetches from a batcher whenever it rings."""

    def __init__(self, batcher: Any, llm: stand_in.LLM, clock: Clock) -> None:
        self.batcher, self.llm, self.clock = batcher, llm, clock
        self.tokens: dict[int, list[int]] = {}
        self.news: list[NewTokens] = []
        self.ends: dict[int, NewTokens] = {}
        self.released: list[int] = []
        self._next_id = 1

    def start(self, prompt: list[int], max_tokens: int = 8, *, seed: int | None = None, **params: Any) -> int:
        request_id, self._next_id = self._next_id, self._next_id + 1
        route = {name: params.pop(name) for name in ("adapter", "cache_salt") if name in params}
        sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **params})
        self.batcher.start(StartRequest(request_id, prompt, sampling, seed, **route))
        self.tokens[request_id] = []
        return request_id

    def wait(self, until: Callable[[], object], seconds: float = 20) -> None:
        """Fetches until a condition holds; what is thrown by `step` gets out."""
        while not until():
            if not select.select([self.batcher.wakeup], [], [], seconds)[0]:
                raise AssertionError("the engine says nothing any more")
            self.take(self.batcher.step())

    def take(self, made: BatcherOutput) -> None:
        self.released += made.released
        self.news += made.tokens
        for new in made.tokens:
            self.tokens[new.id] += new.token_ids
            if new.finish_reason is not None:
                assert new.id not in self.ends
                self.ends[new.id] = new

    def finish(self, *ids: int) -> None:
        self.wait(lambda: self.ends.keys() >= set(ids))


@pytest.fixture
def package() -> Iterator[None]:
    """TensorRT-LLM is the stand-in."""
    with stand_in.installed():
        yield


@pytest.fixture
def make(package: None, tmp_path: Path) -> Iterator[Callable[..., Fetcher]]:
    """An engine with these options over a stand-in with these faults; its clock stands still."""
    made: list[Any] = []

    def make_one(faults: dict[str, Any] | None = None, farewell: float = 20.0, **options: Any) -> Fetcher:
        from penstock.engines.tensorrt_llm.adapters import TensorRTLLMAdapters
        from penstock.engines.tensorrt_llm.batcher import TensorRTLLMBatcher
        from penstock.engines.tensorrt_llm.config import read_checkpoint, read_config
        from penstock.engines.tensorrt_llm.loading import start

        clock = Clock()
        folder = write_model(tmp_path / "model")
        config = read_config({"model_dir": str(folder), "num_blocks": 24, "max_num_seqs": 8} | options)
        checkpoint = read_checkpoint(config)
        adapters, llm = TensorRTLLMAdapters(config), start(config, checkpoint)
        llm.faults = stand_in.Faults(**faults or {})
        times = {"interval": 0.005, "farewell": farewell}
        batcher = TensorRTLLMBatcher(llm, adapters, config, checkpoint, "1.2.1", clock, **times)
        made.append(batcher)
        return Fetcher(batcher, llm, clock)

    yield make_one
    for batcher in made:
        batcher.close()


@pytest.fixture
def engine(make: Callable[..., Fetcher]) -> Fetcher:
    return make()
