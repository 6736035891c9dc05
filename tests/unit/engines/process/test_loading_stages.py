"""What an engine process says while it loads reaches the gateway, stage by stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engines.contract.loading import Loading
from penstock.engines.errors import EngineError
from penstock.engines.process.client import ProcessEngine
from penstock.engines.registry import EngineSpec
from penstock.gateway.configuration.config import load_config
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import Tokenizer

DEMO = find_model(None)


def spec(runner: str) -> EngineSpec:
    settings = {"engine": runner, "num_kv_blocks": 64, "max_num_seqs": 4, "threads": 1}
    return engine_spec(load_config(settings, environ={}).models, DEMO, Tokenizer(DEMO.folder))


@pytest.mark.parametrize(
    ("runner", "stages"), [("openvino", ["weights", "compile", "warm-up"]), ("torch", ["weights", "checks"])]
)
async def test_stages_come_in_order_with_the_tensors_counted(runner: str, stages: list[str]) -> None:
    pytest.importorskip(runner)
    reports: list[Loading | None] = []
    engine = ProcessEngine(spec(runner), on_loading=reports.append)
    try:
        await engine.start()
    finally:
        await engine.stop()
    assert reports[-1] is None
    told = [report for report in reports if report is not None]
    assert len(told) == len(reports) - 1
    assert list(dict.fromkeys(report.stage for report in told)) == stages
    counted = [report for report in told if report.total]
    assert counted
    assert {(report.stage, report.unit) for report in counted} == {("weights", "tensors")}
    assert counted == sorted(counted, key=lambda report: report.done)
    assert counted[-1].done == counted[-1].total > 10


async def test_the_end_is_told_also_when_the_model_cannot_be_loaded() -> None:
    reports: list[Loading | None] = []
    broken = EngineSpec(runner="simulated", options={"vocab_size": 0})
    engine = ProcessEngine(broken, on_loading=reports.append)
    with pytest.raises(EngineError):
        await engine.start()
    await engine.stop()
    assert reports == [None]


@pytest.mark.parametrize("base", ["RuntimeError", "PanicException"])
async def test_whatever_ends_a_load_is_one_line_with_the_settings_and_what_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    """Rust's panics are BaseExceptions. A hook of Python's raises it in the engine's process."""
    hook = f"""
from penstock.engines import registry
class PanicException(BaseException): pass
def load_core(spec, clock, report):
    report(registry.Loading("warm-up"))
    raise {base}("Exception from src/plugins/graph.cpp:1628:\\nkernel could not be made\\n\\n\\n")
registry.load_core = load_core
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    options = {"dtype": "bf16", "weights": "int8", "kv_cache_dtype": "auto", "model_dir": "/m"}
    engine = ProcessEngine(EngineSpec(runner="simulated", options=options))
    with pytest.raises(EngineError) as caught:
        await engine.start()
    await engine.stop()
    assert caught.value.message == (
        f"{base}: kernel could not be made (engine simulated, dtype bf16, weights int8, kv-cache-dtype auto, "
        "stage warm-up); try --dtype f32 or --weights auto; --log-level debug shows the trace"
    )
