"""The simulated engine with its own scheduler, stepped or in a thread of its own: the same tokens as under ours."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import FinishReason, SamplingParams
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import NumericalError
from penstock.engines.simulated import OwnThread, SimulatedBatcher, SimulatedBatcherConfig
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, VOCAB, alone


def config(**options: object) -> SimulatedBatcherConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "first_token_id": FIRST,
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 1000,
        "faults": f"raise={RAISE},nan={NAN}",
    }
    return SimulatedBatcherConfig(**settings | options)  # type: ignore[arg-type]


def start(request_id: int, prompt: list[int], max_tokens: int = 5, adapter: str = "") -> StartRequest:
    return StartRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), None, adapter=adapter)


@pytest.fixture
def thread() -> Iterator[OwnThread]:
    engine = OwnThread(SimulatedBatcher(config()))
    yield engine
    engine.close()


def gather(batcher: SimulatedBatcher | OwnThread, ends: int) -> dict[int, list[NewTokens]]:
    """Everything until so many requests have ended or were released."""
    found: dict[int, list[NewTokens]] = {}
    while ends > 0:
        if batcher.wakeup is not None:
            assert select.select([batcher.wakeup], [], [], 30)[0], "it never says that there is something"
        output = batcher.step()
        for new in output.tokens:
            found.setdefault(new.id, []).append(new)
            ends -= new.finish_reason is not None
        ends -= len(output.released)
    return found


@pytest.mark.parametrize("own_thread", [False, True])
def test_tokens_are_those_of_the_model(own_thread: bool, thread: OwnThread) -> None:
    batcher = thread if own_thread else SimulatedBatcher(config())
    prompts = {1: [1, 2, 3], 2: [4] * 9, 3: [1, 2, 3]}
    for request_id, prompt in prompts.items():
        batcher.start(start(request_id, prompt, 3 + request_id, "x:1" if request_id == 3 else ""))
    found = gather(batcher, 3)
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=3 + request_id, temperature=0)
        tokens = [token for new in found[request_id] for token in new.token_ids]
        assert tokens == alone(prompt, params, adapter="x:1" if request_id == 3 else "")[0]
        assert found[request_id][-1].finish_reason is FinishReason.LENGTH
    assert batcher.num_free_blocks == batcher.info.num_blocks


def test_a_step_is_one_iteration() -> None:
    batcher = SimulatedBatcher(config(max_num_batched_tokens=4, max_num_seqs=4))
    batcher.start(start(1, [1] * 6, 2))
    assert [batcher.step().num_scheduled_tokens for _ in range(4)] == [4, 2, 1, 0]


def test_an_engine_short_of_blocks_tells_of_preemptions() -> None:
    batcher = SimulatedBatcher(config(num_blocks=8))
    batcher.start(start(1, [1], 30))
    batcher.start(start(2, [2], 30))
    preemptions = ends = 0
    while ends < 2:
        output = batcher.step()
        preemptions += output.num_preemptions
        ends += sum(new.finish_reason is not None for new in output.tokens)
    assert preemptions > 0


@pytest.mark.parametrize("after", [0, 2])
def test_an_abort_takes_effect_after_so_many_iterations(after: int) -> None:
    batcher = SimulatedBatcher(config(abort_after=after))
    batcher.start(start(1, [1], 50))
    batcher.step()
    batcher.abort([1])
    for _ in range(after):
        assert batcher.step() == BatcherOutput([NewTokens(1, pytest.approx([0], abs=VOCAB))], [], 1)  # type: ignore[arg-type]
    assert batcher.step() == BatcherOutput(released=[1])
    assert not batcher.has_work
    assert batcher.num_free_blocks == 64


def test_without_an_end_of_aborts_a_request_is_never_heard_of_again() -> None:
    batcher = SimulatedBatcher(config(abort_after=None))
    batcher.start(start(1, [1], 5))
    batcher.abort([1])
    while batcher.has_work:
        assert batcher.step().released == batcher.step().tokens == []


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_fault_of_one_request_and_one_of_the_engine(own_thread: bool, thread: OwnThread) -> None:
    batcher = thread if own_thread else SimulatedBatcher(config())
    batcher.start(start(1, [NAN]))
    [new] = gather(batcher, 1)[1]
    assert isinstance(new.error, NumericalError)
    batcher.start(start(2, [RAISE]))
    with pytest.raises(RuntimeError):
        gather(batcher, 1)


def test_the_descriptor_is_quiet_once_everything_is_fetched(thread: OwnThread) -> None:
    assert thread.wakeup is not None
    assert not select.select([thread.wakeup], [], [], 0)[0]
    thread.start(start(1, [1]))
    gather(thread, 1)
    assert not select.select([thread.wakeup], [], [], 0)[0]
    assert thread.step() == BatcherOutput()


def test_aborts_reach_the_thread(thread: OwnThread) -> None:
    thread.start(start(1, [1], 900))
    thread.abort([1])
    gather(thread, 1)
    assert thread.num_free_blocks == 64


def test_both_kinds_host_adapters(thread: OwnThread) -> None:
    assert isinstance(thread, AdapterHost)
    assert isinstance(SimulatedBatcher(config()), AdapterHost)
