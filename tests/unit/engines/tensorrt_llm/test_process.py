"""In an engine process of its own, as it is served: the stand-in is what that process finds installed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import support.tensorrt_llm as stand_in
from penstock.engines.contract.messages import AddRequest, FinishReason, SamplingParams
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.process.client import ProcessEngine
from penstock.engines.registry import EngineSpec
from unit.engines.tensorrt_llm.conftest import write_model

PROMPT = list(range(10, 50))
INSTALLED = "import support.tensorrt_llm\nkept = support.tensorrt_llm.installed()\nkept.__enter__()\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Python's start-up hook puts the stand-in in place, and a distribution says which version it is."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(INSTALLED)

    def install(version="1.2.1"):
        info = site / f"tensorrt_llm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: {version}\n")
        found = [str(site), str(Path(stand_in.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))

    return install


def engine_of(tmp_path, **options):
    options = {"model_dir": str(write_model(tmp_path / "model")), "num_blocks": 24, "max_num_seqs": 8} | options
    return ProcessEngine(EngineSpec(runner="tensorrt_llm", options=options))


async def tokens_of(engine, count=8, **params):
    ids = engine.new_ids(1)
    sampling = SamplingParams(**{"max_tokens": count, "temperature": 0, "ignore_eos": True} | params)
    stream = engine.submit([AddRequest(ids, PROMPT, sampling, arrival_time=time.monotonic())])
    outputs = [output async for some in stream for output in some]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    return [token for output in outputs for token in output.token_ids]


async def test_it_serves_and_comes_back_after_kill_9(installed, tmp_path):
    installed()
    engine = engine_of(tmp_path)
    await engine.start()
    try:
        assert engine.info.runner.startswith("tensorrt_llm 1.2.1")
        found = await asyncio.gather(*[tokens_of(engine, n) for n in range(1, 20)])
        assert found == [stand_in.greedy(PROMPT, n) for n in range(1, 20)]
        with pytest.raises(UnsupportedError, match="--lora"):
            await engine.load_adapter("a:1", tmp_path)
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while engine.ready:
                await asyncio.sleep(0.01)
            while not engine.ready:
                await asyncio.sleep(0.01)
        assert await tokens_of(engine) == stand_in.greedy(PROMPT, 8)
    finally:
        await engine.stop()


async def test_a_version_that_is_not_known_does_not_start(installed, tmp_path):
    installed("1.3.0")
    engine = engine_of(tmp_path)
    with pytest.raises(EngineError, match=r"tensorrt-llm 1\.3\.0 is installed, but this engine needs 1\.2"):
        await engine.start()
    await engine.stop()


async def test_an_argument_that_is_not_known_does_not_start(installed, tmp_path):
    installed()
    engine = engine_of(tmp_path, engine_args={"smpler_type": "auto"})
    with pytest.raises(EngineError, match="no argument smpler_type; did you mean sampler_type"):
        await engine.start()
    await engine.stop()
