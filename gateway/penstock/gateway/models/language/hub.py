"""Models of the Hugging Face hub. A process of its own downloads them: one that can be ended at any time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from penstock.engines.contract.loading import Loading, Report
from penstock.gateway.configuration.config import ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.models import ModelSource, find_model, is_hub_id


async def fetch_model(model: str | None, report: Report, revision: str | None = None) -> ModelSource:
    """As `find_model`, or a snapshot from the hub. Raises ConfigError."""
    check_revision(model, revision)
    if model is None or not is_hub_id(model):
        return find_model(model)
    return ModelSource(await _download(model, revision, report), model)


async def fetch_draft_model(settings: ModelSettings, report: Report) -> ModelSettings:
    """The settings with a folder in place of a draft model's hub id. Raises ConfigError."""
    name = settings.model.speculative_model
    if name is None or not is_hub_id(name):
        return settings
    try:
        folder = await _download(name, None, report)
    except ConfigError as error:
        raise ConfigError(f"speculative-{error}") from None
    return overlay(settings, {"speculative_model": str(folder)})


def check_revision(model: str | None, revision: str | None) -> None:
    """Raises ConfigError for a revision of what is not on the hub."""
    if revision is not None and not is_hub_id(model):
        raise ConfigError("revision: only hub models have revisions, and MODEL is not one")


async def _download(hub_id: str, revision: str | None, report: Report) -> Path:
    report(Loading("download"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.gateway.models.language.hub_download", hub_id),
        *([] if revision is None else [revision]),
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
            with suppress(ProcessLookupError):
                # not `process.kill`, which would take the exit status away from the loop if it has just ended
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    raise ConfigError(f"model: {problem}")
