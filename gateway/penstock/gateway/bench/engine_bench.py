"""`penstock bench engine`: prompts, decode steps, memory and loading, beside what the machine can do."""

from __future__ import annotations

from penstock.engines.host.memory import ResidentMemory, resident_memory
from penstock.gateway.bench.engine_report import EngineReport, Memory, Pages, table
from penstock.gateway.bench.figures import this_machine
from penstock.gateway.bench.limits import limits_of
from penstock.gateway.bench.loading import find, load
from penstock.gateway.bench.measuring import compare_products, measure
from penstock.gateway.bench.options import EngineBench
from penstock.gateway.configuration.config import Config, overlay

__all__ = ["run", "table"]


def run(config: Config, wanted: EngineBench) -> EngineReport:
    """Raises ConfigError, PenstockError."""
    machine = this_machine()
    found = find(overlay(config, {"max_num_seqs": max(config.scheduling.max_num_seqs, *wanted.batch_sizes)}))
    before = resident_memory()
    runner, times = load(found)
    try:
        loaded, chunk = resident_memory(), found.spec.scheduler.max_num_batched_tokens
        work = runner.info.work
        limits = limits_of(work, wanted.repeats)
        rows = measure(runner, chunk, wanted, limits)
        measured = resident_memory()
        if work is not None and limits is not None:
            compare_products(rows, work, chunk, limits)
        return EngineReport(
            machine=machine,
            model=found.name,
            runner=runner.info.runner,
            chunk=chunk,
            decode_steps=wanted.decode_steps,
            repeats=wanted.repeats,
            load=times,
            memory=Memory(_pages(before), _pages(loaded), _pages(measured), loaded.peak),
            work=work,
            products=rows.products,
            prompts=rows.prompts,
            decode=rows.decode,
            left_out=rows.left_out,
        )
    finally:
        runner.close()


def _pages(memory: ResidentMemory) -> Pages:
    return Pages(memory.anonymous, memory.file)
