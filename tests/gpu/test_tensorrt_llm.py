"""The TensorRT-LLM engine over the real package: the contract, tokens, aborts, statistics. Not yet run."""

from __future__ import annotations

import importlib.util
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed"),
]

PROMPTS = [[3 + (7 * j + 13 * i) % 290 for j in range(30 + 40 * i)] for i in range(4)]


def test_the_installed_release_keeps_the_contract() -> None:
    from penstock.engines.tensorrt_llm.contract import CONTRACT

    assert list(CONTRACT.differences()) == []


@pytest.fixture(scope="module")
def batcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from penstock.engines.tensorrt_llm.loading import load
    from support.models import make_model

    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    folder: Path = make_model(tmp_path_factory.mktemp("model"), "llama", eos_token_id=None, **shape)
    batcher = load({"model_dir": str(folder), "num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256})
    yield batcher
    batcher.close()


def run(batcher: Any, core: Any, until: Callable[[], bool]) -> list[Any]:
    outputs: list[Any] = []
    while not until():
        assert select.select([batcher.wakeup], [], [], 60)[0]
        outputs += core.step([]).outputs
    return outputs


def test_tokens_aborts_and_what_is_left(batcher: Any) -> None:
    from penstock.engines.autonomous.core import AutonomousCore
    from penstock.engines.contract.messages import AbortRequests, AddRequest, SamplingParams
    from penstock.engines.scheduler.config import SchedulerConfig

    now = 0.0
    core = AutonomousCore(batcher, SchedulerConfig(max_num_seqs=8), lambda: now)
    assert core.info.num_blocks == 256
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2)
    tokens: dict[int, list[int]] = {}
    for turn in range(2):
        ids = range(10 * turn, 10 * turn + len(PROMPTS))
        tokens |= {i: [] for i in ids}
        core.step([AddRequest((i,), prompt, params, now) for i, prompt in zip(ids, PROMPTS, strict=True)])
        for output in run(batcher, core, lambda: not core.requests):
            assert output.error is None
            tokens[output.id] += output.token_ids
            assert [entry.token_id for entry in output.logprobs or ()] == output.token_ids
    assert all(len(found) == 24 for found in tokens.values())
    assert [tokens[i] for i in range(len(PROMPTS))] == [tokens[10 + i] for i in range(len(PROMPTS))]
    assert core.stats().prefix_hits > 0

    core.step([AddRequest((99,), PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True, temperature=0), now)])
    assert select.select([batcher.wakeup], [], [], 60)[0]
    core.step([AbortRequests([99])])
    run(batcher, core, lambda: not core.seats.aborted)
    assert batcher.watchdog.counters.released == 0
    assert core.stats().num_free_blocks == 256
