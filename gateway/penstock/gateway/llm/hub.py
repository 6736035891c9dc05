"""Models of the Hugging Face hub. A process of its own downloads them: one that can be ended at any time."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from penstock.engines.contract.loading import Loading, Report
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.llm.models import ModelSource, find_model, is_hub_id


async def fetch_model(model: str | None, report: Report) -> ModelSource:
    """As `find_model`, or a snapshot from the hub. Raises ConfigError."""
    if model is None or not is_hub_id(model):
        return find_model(model)
    return ModelSource(await _download(model, report), model)


async def _download(hub_id: str, report: Report) -> Path:
    report(Loading("download"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.gateway.llm.hub_download", hub_id),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the server, which ends this one
    )
    assert process.stdout is not None
    problem = f"{hub_id} cannot be downloaded: the process that does it ended"
    try:
        async for line in process.stdout:
            said = json.loads(line)
            if "folder" in said:
                return Path(said["folder"])
            if "problem" in said:
                problem = said["problem"]
            else:
                report(Loading("download", **said))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise ConfigError(f"model: {problem}")
