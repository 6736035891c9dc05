"""Prompts and decode steps, on the simulated engine with a clock of its own: figures are exact."""

from __future__ import annotations

import msgspec
import pytest

from penstock.engines.contract.model_info import ModelInfo, ModelWork
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import InvalidRequestError, NumericalError
from penstock.engines.simulated.runner import LatencyModel, SimulatedConfig, SimulatedRunner
from penstock.gateway.commands.bench.engine_bench import (
    Rows,
    StepDriver,
    compare_products,
    decode_bytes,
    decode_flops,
    measure,
    prompt_flops,
)
from penstock.gateway.commands.bench.figures import Spread
from penstock.gateway.commands.bench.options import EngineBench
from penstock.kvcache import KVGroup, StateGroup
from unit.gateway.commands.bench.known_work import WORK

LATENCY = LatencyModel(per_step=0.002, per_sequence=0.001, per_prefill_token=0.0001)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Limits:
    """That are asked for, and easy to divide by."""

    def __init__(self) -> None:
        self.reads: list[tuple[float, int]] = []
        self.products: list[int] = []

    def read_speed(self, num_bytes: float, threads: int) -> Spread:
        self.reads.append((num_bytes, threads))
        return Spread.of([1e9, 8e8, 9e8])

    def product_speed(self, threads: int) -> Spread:
        self.products.append(threads)
        return Spread.of([threads * 5e8, threads * 1e9, 0.0])


def make_runner(clock: Clock, work: ModelWork | None = None, **config: object) -> SimulatedRunner:
    given = {"kv_groups": (KVGroup(16), KVGroup(16, window=8)), "latency": LATENCY, "max_model_len": 512, **config}
    runner = SimulatedRunner(msgspec.convert(given, SimulatedConfig), clock.sleep, clock)
    runner.info = msgspec.structs.replace(runner.info, work=work)
    return runner


def measured(
    wanted: EngineBench, limits: Limits | None = None, work: ModelWork | None = None, chunk: int = 64, **config: object
) -> tuple[Rows, ModelInfo]:
    clock = Clock()
    runner = make_runner(clock, work, **config)
    return measure(runner, chunk, wanted, limits, clock), runner.info


def test_a_prompt_takes_its_steps() -> None:
    wanted = EngineBench(prompt_lengths=(100,), batch_sizes=(1,), context_lengths=(10,), decode_steps=2, repeats=3)
    [row] = measured(wanted)[0].prompts
    seconds = 2 * (0.002 + 0.001) + 98 * 0.0001  # two steps, of 64 and 36 tokens
    assert row.seconds.median == pytest.approx(seconds)
    assert row.seconds.least == pytest.approx(row.seconds.most)
    assert row.tokens_per_second.median == pytest.approx(100 / seconds)
    assert row.flops is None
    assert row.share_of_flops is None


def test_each_batch_with_each_context() -> None:
    wanted = EngineBench(prompt_lengths=(8,), batch_sizes=(1, 3), context_lengths=(10, 40), decode_steps=4, repeats=3)
    rows = measured(wanted)[0].decode
    assert [(row.context_length, row.batch_size) for row in rows] == [(10, 1), (10, 3), (40, 1), (40, 3)]
    for row in rows:
        seconds = 0.002 + 0.001 * row.batch_size
        assert row.step_ms.median == pytest.approx(1e3 * seconds)
        assert row.step_ms.most == pytest.approx(row.step_ms.least)
        assert row.tokens_per_second.median == pytest.approx(row.batch_size / seconds)


def test_shares_of_what_the_machine_can_do() -> None:
    limits = Limits()
    wanted = EngineBench(prompt_lengths=(100,), batch_sizes=(1, 5), context_lengths=(32,), decode_steps=4, repeats=3)
    rows, info = measured(wanted, limits, WORK)
    compare_products(rows, WORK, 64, limits)
    attended = 32 + 1 + 3 + 5.5  # the token itself, the warm-up, half of the other steps
    for row, seconds in zip(rows.decode, (0.003, 0.007), strict=True):
        num_bytes = decode_bytes(WORK, info.kv_groups, row.batch_size, attended)
        flops = decode_flops(WORK, info.kv_groups, row.batch_size, attended)
        assert (row.bytes, row.flops) == (num_bytes, flops)
        assert row.share_of_read_speed == pytest.approx(num_bytes / seconds / 1e9)
        threads = 1 if row.batch_size == 1 else 2
        assert row.share_of_flops == pytest.approx(flops / seconds / (threads * 1e9))
    [prompt] = rows.prompts
    assert prompt.flops == prompt_flops(WORK, info.kv_groups, 100)
    assert prompt.share_of_flops == pytest.approx(prompt.flops / prompt.seconds.median / 2e9)
    assert [threads for _, threads in limits.reads] == [1, 2]
    assert sorted(limits.products) == [1, 2]
    assert [product.threads for product in rows.products] == [1, 2]


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    wanted = EngineBench(prompt_lengths=(511, 512), batch_sizes=(1, 8), context_lengths=(100,), decode_steps=4)
    rows, _ = measured(wanted, num_blocks=80)
    assert [row.tokens for row in rows.prompts] == [511]
    assert [row.batch_size for row in rows.decode] == [1]
    assert rows.left_out == [
        "prompt 512: 513 tokens with what is generated are more than the model's 512",
        "batch 8, context 100: it needs 128 blocks of the KV cache, which has 80",
    ]


def test_nothing_fits() -> None:
    with pytest.raises(InvalidRequestError, match="nothing can be measured: prompt 600: 601 tokens"):
        measured(EngineBench(prompt_lengths=(600,), batch_sizes=(1,), context_lengths=(600,)))


def test_a_request_that_fails_ends_the_measurement() -> None:
    every_token = ",".join(f"nan={token}" for token in range(4))
    with pytest.raises(NumericalError):
        measured(EngineBench(prompt_lengths=(64,)), vocab_size=4, faults=every_token)


class Watched(SimulatedRunner):
    """Keeps what it is told."""

    steps: list[SchedulerOutput]

    def submit(self, step: SchedulerOutput) -> None:
        self.steps.append(step)
        super().submit(step)


def test_requests_share_no_blocks_and_give_them_back() -> None:
    runner = Watched(SimulatedConfig(num_blocks=8, block_size=4), lambda seconds: None)
    runner.steps = []
    driver = StepDriver(runner, 4, Clock())
    for _ in range(3):  # more than there is room for at one time
        for prompt in ([1, 2, 3, 4, 5], [6, 7]):
            driver.begin(prompt, room=6)
        driver.decode(5)
        driver.drop_all()
    new = [request for step in runner.steps for request in step.new_requests]
    assert [len(request.block_ids[0]) for request in new] == [3, 2] * 3
    for first, second in zip(new[::2], new[1::2], strict=True):
        assert not set(first.block_ids[0]) & set(second.block_ids[0])
    dropped = [request_id for step in runner.steps for request_id in step.dropped_ids]
    assert dropped == [request.id for request in new[:4]]
    decodes = [step for step in runner.steps if len(step.request_ids) == 2]
    assert [step.num_computed_tokens for step in decodes[:5]] == [[5 + n, 2 + n] for n in range(5)]


def test_requests_get_rows_of_states_of_their_own() -> None:
    runner = Watched(SimulatedConfig(num_blocks=8, block_size=4, states=StateGroup(8, 4, 4)), lambda seconds: None)
    runner.steps = []
    driver = StepDriver(runner, 4, Clock())
    for _ in range(3):
        for prompt in ([1, 2, 3, 4, 5], [6, 7]):
            driver.begin(prompt, room=6)
        driver.decode(5)
        driver.drop_all()
    tables = [request.block_ids for step in runner.steps for request in step.new_requests]
    assert [[len(table) for table in both] for both in tables] == [[3, 4], [2, 2]] * 3
    assert all(not set(first[1]) & set(second[1]) for first, second in zip(tables[::2], tables[1::2], strict=True))
