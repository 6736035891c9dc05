"""The ledger, over machines and GPUs that are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engines.errors import InvalidRequestError, MemoryBudgetError, from_code
from penstock.gateway.errors import wire_shape
from penstock.gateway.metrics.machine import GpuMemory
from penstock.gateway.models.memory.budget import CacheWish, Demand, MemoryBudget, MemoryNeeds, Need, Reservation

MIB = 1 << 20


class Machine:
    """Its memory, and what each process has taken of it."""

    def __init__(self, total: int, **settings: Any) -> None:
        self.total = total
        self.taken: dict[int, int] = {}
        self.gpus: list[GpuMemory | None] = []
        self.budget = MemoryBudget(
            gpus=lambda: self.gpus,
            available=lambda: self.total - sum(self.taken.values()),
            taken=lambda pid: self.taken.get(pid, 0),
            **settings,
        )

    def reserve(self, name: str, demand: Demand, pid: int | None = None) -> Reservation:
        return self.budget.reserve(name, demand, lambda: pid)


def fixed(weights: int, cache: int = 0, rest: int = 0) -> Demand:
    return Demand(
        host=MemoryNeeds(weights=weights * MIB, cache=CacheWish(fixed=cache * MIB), rest=rest * MIB), hints="dtype"
    )


def sized(weights: int, *, share: float = 0.5, least: int = 0, most: int | None = None, workers: int = 1) -> Demand:
    wish = CacheWish(share=share, least=least * MIB, most=None if most is None else most * MIB)
    return Demand(host=MemoryNeeds(weights=weights * MIB, cache=wish), sets_cache=True, workers=workers)


def on_gpus(share: float | None, *gpus: int, weights: int = 0, cache: CacheWish | None = None) -> Demand:
    device = MemoryNeeds(weights=weights, cache=cache or CacheWish())
    return Demand(host=MemoryNeeds(), device=device, gpus=gpus or (0,), gpu_share=share, hints="gpu_memory_utilization")


def test_the_refusal_has_the_figures() -> None:
    machine = Machine(1000 * MIB, limit="900MiB")
    machine.reserve("first", fixed(500, 100))
    with pytest.raises(MemoryBudgetError) as refused:
        machine.reserve("second", fixed(200, 1024 * 2, 50))
    assert refused.value.message == (
        "model 'second' does not fit into memory: it needs 2.2 GiB: 200 MiB weights, 2.0 GiB KV cache, "
        "50 MiB for the process and its steps; 300 MiB of memory_limit 900 MiB are left; "
        "make it smaller (dtype) or unload another (first 600 MiB)"
    )


def test_how_it_crosses_the_wire() -> None:
    shape = wire_shape(from_code("memory_budget", "too large"))
    assert (shape.status, shape.code, shape.grpc) == (503, "memory_budget", "RESOURCE_EXHAUSTED")


def test_without_a_limit_what_is_free_counts() -> None:
    machine = Machine(1000 * MIB)
    machine.reserve("fits", fixed(1000))
    with pytest.raises(MemoryBudgetError, match=r"it needs 1 MiB: .*; 0 MiB are free"):
        machine.reserve("more", fixed(1))


def test_what_a_model_has_not_taken_yet_is_not_free_for_others() -> None:
    """While it loads, later (caches are filled by requests), and after its engine has died."""
    machine = Machine(1000 * MIB)
    machine.reserve("loading", fixed(600), pid=1)
    for taken in (0, 300, 600):
        machine.taken[1] = taken * MIB
        with pytest.raises(MemoryBudgetError, match="400 MiB are free"):
            machine.reserve("other", fixed(401))
    machine.taken.clear()
    machine.reserve("other", fixed(400))


def test_what_a_model_takes_beyond_its_need_counts_as_well() -> None:
    machine = Machine(10_000 * MIB, limit=1000 * MIB)
    machine.reserve("greedy", fixed(100), pid=1)
    machine.taken[1] = 700 * MIB
    with pytest.raises(MemoryBudgetError, match="300 MiB of memory_limit"):
        machine.reserve("other", fixed(301))


def test_a_limit_does_not_make_memory() -> None:
    with pytest.raises(MemoryBudgetError, match="100 MiB are free"):
        Machine(100 * MIB, limit="1TiB").reserve("large", fixed(101))


def test_a_limit_may_be_a_share_of_what_is_free_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.host.memory.available_memory", lambda: 1000 * MIB)
    machine = Machine(2000 * MIB, limit="50%")
    with pytest.raises(MemoryBudgetError, match="500 MiB of memory_limit 500 MiB are left"):
        machine.reserve("large", fixed(501))


def test_a_limit_that_is_none() -> None:
    with pytest.raises(InvalidRequestError):
        MemoryBudget("a lot")


def test_room_is_given_back_once() -> None:
    machine = Machine(1000 * MIB)
    first, second = (machine.reserve(name, fixed(500)) for name in ("a", "b"))
    for _ in range(2):
        machine.budget.release(first)
    with pytest.raises(MemoryBudgetError, match=r"unload another \(b 500 MiB\)"):
        machine.reserve("large", fixed(501))
    machine.budget.release(second)
    machine.reserve("large", fixed(1000))


async def test_a_model_that_is_ending_is_waited_for() -> None:
    machine = Machine(1000 * MIB)
    staying, leaving = (machine.reserve(name, fixed(500)) for name in ("staying", "leaving"))
    with pytest.raises(MemoryBudgetError):
        await machine.budget.claim("new", fixed(400), lambda: None)
    leaving.ending = True
    waiting = asyncio.create_task(machine.budget.claim("new", fixed(400), lambda: None))
    hopeless = asyncio.create_task(machine.budget.claim("hopeless", fixed(600), lambda: None))
    await asyncio.sleep(0)
    assert not waiting.done()
    machine.budget.release(leaving)
    assert (await waiting).name == "new"
    with pytest.raises(MemoryBudgetError):
        await hopeless
    machine.budget.release(staying)


def test_a_new_version_counts_beside_the_old_one() -> None:
    machine = Machine(1000 * MIB)
    machine.reserve("model", fixed(600))
    with pytest.raises(MemoryBudgetError):
        machine.reserve("model", fixed(600))


def test_caches_that_would_be_a_share_of_what_is_free_are_told_their_size() -> None:
    """Three that are loaded at the same time cannot take more than there is."""
    machine = Machine(1000 * MIB)
    places = [machine.reserve(name, sized(100)) for name in ("a", "b", "c")]
    assert [place.cache for place in places] == [450 * MIB, 175 * MIB, int(37.5 * MIB)]
    assert sum(place.host.total for place in places) <= machine.total


def test_bounds_of_a_cache() -> None:
    assert Machine(1000 * MIB).reserve("a", sized(0, most=70)).cache == 70 * MIB
    assert Machine(1000 * MIB).reserve("a", sized(900, least=80)).cache == 80 * MIB
    assert Machine(1000 * MIB).reserve("a", sized(200, share=0.25)).cache == 200 * MIB
    assert Machine(1000 * MIB).reserve("a", sized(0, workers=2)).cache == 250 * MIB  # of each
    with pytest.raises(MemoryBudgetError, match="80 MiB KV cache"):
        Machine(1000 * MIB).reserve("a", sized(921, least=80))


def test_an_engine_that_was_told_by_the_operator_is_not_told_again() -> None:
    assert Machine(1000 * MIB).reserve("a", fixed(100, 100)).cache is None


def test_where_the_machine_does_not_tell_only_a_limit_holds() -> None:
    def unknown() -> int:
        raise FileNotFoundError("/proc/meminfo")

    MemoryBudget(available=unknown).reserve("a", sized(10_000_000), lambda: None)
    with pytest.raises(MemoryBudgetError):
        MemoryBudget("1MiB", available=unknown).reserve("a", fixed(2), lambda: None)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two GPUs of 1000 MiB; another process has 50 MiB of the first."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = Machine(1000 * MIB)
    machine.gpus = [GpuMemory("GPU-a", 1000 * MIB, 50 * MIB), GpuMemory("GPU-b", 1000 * MIB, 0)]
    return machine


def test_two_engines_that_want_the_same_gpu(gpu_machine: Machine) -> None:
    first = gpu_machine.reserve("first", on_gpus(0.9))
    assert first.gpus == {"GPU-a": 900 * MIB}
    with pytest.raises(MemoryBudgetError) as refused:
        gpu_machine.reserve("second", on_gpus(0.9))
    assert refused.value.message == (
        "model 'second' does not fit into memory: it needs 900 MiB (gpu_memory_utilization 0.9); "
        "50 MiB of GPU GPU-a (1000 MiB) are free; make it smaller (gpu_memory_utilization) "
        "or unload another (first 900 MiB)"
    )
    gpu_machine.budget.release(first)
    gpu_machine.reserve("second", on_gpus(0.9))


def test_memory_of_a_gpu_is_not_counted_twice(gpu_machine: Machine) -> None:
    """Once the first has loaded, its memory is in use as the driver sees it, and ours as the ledger does."""
    first = gpu_machine.reserve("first", on_gpus(0.4))
    gpu_machine.gpus[0] = GpuMemory("GPU-a", 1000 * MIB, 250 * MIB)  # half way through its loading
    gpu_machine.reserve("second", on_gpus(0.5))
    with pytest.raises(MemoryBudgetError, match="50 MiB of GPU"):
        gpu_machine.reserve("third", on_gpus(0.1))
    assert first.loading


def test_what_others_have_taken_meanwhile_is_seen(gpu_machine: Machine) -> None:
    gpu_machine.reserve("first", on_gpus(0.4)).loading = False
    gpu_machine.gpus[0] = GpuMemory("GPU-a", 1000 * MIB, 700 * MIB)
    with pytest.raises(MemoryBudgetError, match="300 MiB of GPU"):
        gpu_machine.reserve("second", on_gpus(0.5))


def test_each_gpu_of_a_model_is_checked(gpu_machine: Machine) -> None:
    gpu_machine.reserve("wide", on_gpus(0.5, 0, 1))
    with pytest.raises(MemoryBudgetError, match="GPU-b"):
        gpu_machine.reserve("right", on_gpus(0.6, 1))
    gpu_machine.reserve("left", on_gpus(0.4, 0))


@pytest.mark.parametrize(("shown", "uuid"), [("1,0", "GPU-b"), ("GPU-b", "GPU-b"), ("0", "GPU-a")])
def test_the_first_gpu_is_the_first_that_cuda_shows(
    gpu_machine: Machine, monkeypatch: pytest.MonkeyPatch, shown: str, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert list(gpu_machine.reserve("model", on_gpus(0.5)).gpus) == [uuid]


def test_gpus_that_tell_nothing_are_not_checked(gpu_machine: Machine) -> None:
    gpu_machine.gpus = [None]
    assert gpu_machine.reserve("model", on_gpus(0.9, 0, 1)).gpus == {}
    gpu_machine.gpus = []
    assert gpu_machine.reserve("model", on_gpus(0.9)).gpus == {}


def test_weights_beyond_the_share_of_a_gpu(gpu_machine: Machine) -> None:
    with pytest.raises(MemoryBudgetError, match=r"at least 200 MiB weights and 150 MiB KV cache on each GPU; it may "):
        gpu_machine.reserve("big", on_gpus(0.3, weights=200 * MIB, cache=CacheWish(share=0.9, least=150 * MIB)))


def test_a_cache_on_a_gpu_is_what_its_weights_leave(gpu_machine: Machine) -> None:
    free = on_gpus(None, weights=150 * MIB, cache=CacheWish(share=0.5))
    place = gpu_machine.reserve("torch", Demand(host=free.host, device=free.device, gpus=(0,), sets_cache=True))
    assert (place.cache, place.gpus) == (400 * MIB, {"GPU-a": 550 * MIB})
    within = on_gpus(0.5, weights=150 * MIB, cache=CacheWish(share=1.0))
    place = gpu_machine.reserve(
        "trt", Demand(host=within.host, device=within.device, gpus=(1,), gpu_share=0.5, sets_cache=True)
    )
    assert (place.cache, place.gpus) == (350 * MIB, {"GPU-b": 500 * MIB})


def test_a_need_in_words() -> None:
    assert str(Need(3 << 30, 512 * MIB, 0)) == (
        "3.5 GiB: 3.0 GiB weights, 512 MiB KV cache, 0 MiB for the process and its steps"
    )
