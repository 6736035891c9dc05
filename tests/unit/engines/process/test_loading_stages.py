"""What an engine process says while it loads reaches the gateway, stage by stage."""

from __future__ import annotations

import pytest

from penstock.engines.contract.loading import Loading
from penstock.engines.errors import EngineError
from penstock.engines.process.client import ProcessEngine
from penstock.engines.registry import EngineSpec
from penstock.gateway.configuration.config import load_config
from penstock.gateway.llm.engine_spec import engine_spec
from penstock.gateway.llm.models import find_model
from penstock.tokenizers import Tokenizer

DEMO = find_model(None)


def spec(runner: str) -> EngineSpec:
    settings = {"engine": runner, "num_kv_blocks": 64, "max_num_seqs": 4, "threads": 1}
    return engine_spec(load_config(settings, environ={}), DEMO, Tokenizer(DEMO.folder))


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
