"""What operators see of an engine: why requests wait, where blocks are, and which steps there were."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.contract.engine_view import MOST_CELLS, MOST_REQUESTS, EngineView, WaitsFor
from penstock.engines.contract.messages import AddRequest, Grammar, Inspect, LoadAdapter, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.view import block_map
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import BlockPool


def core_of(num_blocks: int = 256, max_loras: int = 0, **limits: Any) -> EngineCore:
    clock = count()
    runner = SimulatedRunner(SimulatedConfig(num_blocks=num_blocks, block_size=4, max_loras=max_loras))
    return EngineCore(runner, SchedulerConfig(**limits), lambda: float(next(clock)))


def add(number: int, prompt: int = 8, label: str = "", **fields: Any) -> AddRequest:
    params = fields.pop("params", SamplingParams(max_tokens=100, ignore_eos=True))
    tokens = [(101 * number + position) % 32_000 for position in range(prompt)]
    return AddRequest((number,), tokens, params, arrival_time=0.0, label=label or str(number), **fields)


def view_of(core: EngineCore, since: int = 0) -> EngineView:
    [reply] = core.step([Inspect(7, since)]).replies
    assert reply.call == 7
    assert reply.view is not None
    return reply.view


def waits(core: EngineCore) -> dict[str, str]:
    return {row.label: row.waits_for for row in view_of(core).requests}


def test_a_seat() -> None:
    core = core_of(max_num_seqs=1)
    core.step([add(1, tenant="blue"), add(2)])
    view = view_of(core)
    first, second = view.requests
    assert (first.label, first.status, first.waits_for, first.tenant) == ("1", "running", "", "blue")
    assert (second.label, second.status, second.waits_for) == ("2", "waiting", WaitsFor.SEAT)
    assert first.prompt_tokens == 8
    assert first.computed_tokens >= 8
    assert first.blocks >= 2
    assert view.seats == 1


def test_blocks_and_turns() -> None:
    core = core_of(num_blocks=16, max_num_seqs=8)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    core.step([add(number, prompt=30, params=params) for number in (1, 2, 3)])
    assert waits(core) == {"1": "", "2": WaitsFor.BLOCKS, "3": WaitsFor.TURN}


def test_the_background_waits_for_others() -> None:
    core = core_of()
    core.step([add(1), add(2, background=True)])
    assert waits(core) == {"1": "", "2": WaitsFor.FOREGROUND}


def test_an_adapter_on_its_way(tmp_path: Any) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    core = core_of(max_loras=1)
    core.adapters.receive(LoadAdapter(1, "poet", str(tmp_path)))
    core.scheduler.add(add(1, adapter="poet"), core._needs_of)
    core.scheduler.schedule(0.0)
    request = next(iter(core.scheduler.intake))
    assert request.pending is not None
    assert request.pending.reason == WaitsFor.ADAPTER
    core.close()


def test_a_grammar_that_is_compiled() -> None:
    core = core_of()
    params = SamplingParams(max_tokens=4, grammar=Grammar("regex", "a+"))
    needs = core.grammars.needs_of(add(1, params=params))
    assert all(need.reason == WaitsFor.GRAMMAR for need in needs)
    core.close()


def test_a_prompt_that_another_request_computes() -> None:
    core = core_of(max_num_batched_tokens=8, max_num_seqs=4)
    tokens = list(range(64))
    same = [AddRequest((n,), tokens, SamplingParams(max_tokens=4), arrival_time=0.0, label=str(n)) for n in (1, 2)]
    core.step(same)
    assert waits(core)["2"] == WaitsFor.SAME_PROMPT


def test_a_sample_that_waits_for_the_first_one() -> None:
    core = core_of(max_num_batched_tokens=8, max_num_seqs=4)
    core.step([AddRequest((1, 2), list(range(64)), SamplingParams(max_tokens=4), arrival_time=0.0, label="both")])
    rows = view_of(core).requests
    assert [row.waits_for for row in rows] == ["", WaitsFor.FIRST_SAMPLE]
    assert {row.label for row in rows} == {"both"}


def test_every_reason_has_a_value() -> None:
    """Those of kvcache, which knows nothing of engines, too."""
    from penstock.engines.adapter_loading import _Load
    from penstock.engines.scheduler.pending import Compilation
    from penstock.engines.scheduler.prefetch import Prefetch, Prefetches, _Twin
    from penstock.kvcache.prefixes import ComputedBlock

    for kind in (_Load, Compilation, Prefetch, Prefetches, _Twin, ComputedBlock):
        assert WaitsFor(kind.reason)


def test_the_list_is_bounded_and_says_how_many_are_left_out() -> None:
    core = core_of(max_num_seqs=2, max_queued_requests=1000)
    core.step([add(number) for number in range(1, MOST_REQUESTS + 51)])
    view = view_of(core)
    assert len(view.requests) == MOST_REQUESTS
    assert view.more_requests == 50
    assert [row.label for row in view.requests] == [str(number) for number in range(1, MOST_REQUESTS + 1)]


def test_steps_have_their_prompt_tokens_and_come_once() -> None:
    core = core_of()
    core.step([add(1, prompt=12)])
    for _ in range(5):
        core.step([])
    view = view_of(core)
    done = [step for step in view.steps if step.seconds > 0]
    assert done[0].num_prompt_tokens == 12
    assert {step.num_prompt_tokens for step in done[1:]} == {0}
    assert [step.number for step in view_of(core, since=view.steps[-1].number).steps][:1] == [view.steps[-1].number + 1]
    assert view_of(core, since=10**6).steps  # of an engine that has died: this one's count begins again


@given(st.integers(1, 5000), st.lists(st.integers(1, 60), max_size=8))
def test_a_map_counts_each_block_once(num_blocks: int, sizes: list[int]) -> None:
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for number, size in enumerate(sizes):
        if size > pool.num_free:
            break
        blocks = pool.allocate(size)
        if number % 3 == 0:
            pool.retain(blocks[: size // 2])
        if number % 3 == 1:
            pool.publish(blocks[0], b"%d" % number)
            pool.release(blocks)
        held.append(blocks)
    blocks_of = block_map(pool)
    assert blocks_of.blank + blocks_of.cached + blocks_of.used + blocks_of.shared == num_blocks
    assert blocks_of.used + blocks_of.shared == num_blocks - pool.num_free
    runs = blocks_of.cells.replace(".", " ").replace("c", " ").replace("u", " ").replace("s", " ").split()
    assert sum(map(int, runs)) == -(-num_blocks // blocks_of.stride) <= MOST_CELLS
