"""Engine processes and what they were counted with."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.errors import EngineError, MemoryBudgetError
from penstock.engines.host.memory import taken_memory
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.gateway.configuration.config import load_config
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.models import find_model
from penstock.gateway.models.memory.budget import Demand, MemoryBudget, MemoryNeeds, Reservation
from penstock.gateway.models.memory.budgeted_engine import BudgetedEngine
from penstock.tokenizers import Tokenizer
from support.classic import until

DEMO = find_model(None)


class Ledger(MemoryBudget):
    """One that shows what it is told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[Reservation] = []

    def reserve(self, name: str, demand: Demand, pid: Any) -> Reservation:
        self.held.append(super().reserve(name, demand, pid))
        return self.held[-1]

    def release(self, reservation: Reservation) -> None:
        super().release(reservation)
        self.held = [each for each in self.held if each is not reservation]


def spec(**settings: Any) -> EngineSpec:
    return engine_spec(load_config(settings, environ={}).models, DEMO, Tokenizer(DEMO.folder))


def engine(budget: MemoryBudget, **settings: Any) -> BudgetedEngine:
    return BudgetedEngine(budget, "demo", spec(**settings), WatchdogConfig(timeout=120))


async def generate(engine: BudgetedEngine) -> None:
    requests = [
        AddRequest(
            (n,), [n % 50 + 3, *range(100, 500)], SamplingParams(max_tokens=4, temperature=0.0), time.monotonic()
        )
        for n in engine.new_ids(4)
    ]
    async for _ in engine.submit(requests):
        pass


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", ["openvino", "torch", "simulated"])
async def test_the_estimate_is_near_what_the_process_takes(name: str) -> None:
    budget = Ledger()
    running = engine(budget, engine=name, num_kv_blocks=64)
    await running.start()
    try:
        await generate(running)
        assert running.pid is not None
        [place] = budget.held
        assert 0.5 < place.host.total / resident(running.pid) < 2
        assert 0 < taken_memory(running.pid) <= resident(running.pid)
    finally:
        await running.stop()
    assert budget.held == []
    assert taken_memory(running.pid) == 0


async def test_the_engine_takes_the_cache_that_it_was_counted_with() -> None:
    budget = Ledger("1GiB")
    running = engine(budget, engine="openvino")
    await running.start()
    [place] = budget.held
    block_bytes = 32 * 6 * 2 * 2 * 64  # of one byte for each value
    taken = running.info.num_blocks * block_bytes
    await running.stop()
    assert place.cache is not None
    assert place.host.total <= 1 << 30
    assert taken * 2 == pytest.approx(place.cache, rel=0.01) or taken * 4 == pytest.approx(place.cache, rel=0.01)


async def test_who_has_slept_takes_what_is_free_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(ProcessEngine, "start", nothing)
    monkeypatch.setattr(ProcessEngine, "stop", nothing)
    budget = Ledger("1GiB")
    sleeping = engine(budget, engine="openvino")
    await sleeping.start()
    [before] = budget.held
    await sleeping.stop("The model fell asleep.")
    assert before.cache is not None
    budget.reserve("other", Demand(host=MemoryNeeds(weights=before.host.total)), lambda: None)
    await sleeping.start()
    now = budget.held[-1].cache
    assert now is not None
    assert 0 < now < before.cache


async def test_a_model_that_cannot_be_loaded_gives_its_room_back(tmp_path: Path) -> None:
    budget = Ledger()
    broken = EngineSpec(runner="openvino", options=spec(engine="openvino").options | {"model_dir": str(tmp_path)})
    running = BudgetedEngine(budget, "broken", broken)
    with pytest.raises(EngineError):
        await running.start()
    assert budget.held == []
    await running.stop()


async def test_nothing_is_started_for_a_model_that_does_not_fit() -> None:
    running = engine(MemoryBudget("1MiB"), engine="simulated")
    with pytest.raises(MemoryBudgetError, match="model 'demo' does not fit"):
        await running.start()
    assert running.pid is None
    await running.stop()


async def test_an_engine_that_has_died_keeps_its_room() -> None:
    budget = MemoryBudget("40MiB")
    running, other = engine(budget, engine="simulated"), engine(budget, engine="simulated")
    await running.start()
    assert running.pid is not None
    os.kill(running.pid, signal.SIGKILL)
    await until(lambda: not running.ready)
    with pytest.raises(MemoryBudgetError):
        await other.start()
    await until(lambda: running.ready)
    assert running.num_restarts == 1
    await running.stop()
    await other.start()
    assert other.ready
    await other.stop()
