"""What a Penstock server makes of the flags, variables and files that it gets in deploy/."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.places import Pod
from penstock.gateway import cli
from penstock.gateway.configuration.config import Config
from penstock.gateway.requests.exposure import check_exposure

REST_SECONDS = 30
"""What a server may need behind its drain: `lifecycle._STOP_SECONDS`."""
IMAGE = {"PENSTOCK_HOST": "0.0.0.0"}
"""The Dockerfile's own settings."""


def parsed(arguments: Sequence[str], environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """As `penstock` itself reads them, with its checks. Fails with its message."""
    found: list[Config] = []
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(cli, "_serve", lambda config, answer: found.append(config) or 0)
        patch.setattr(sys, "exit", lambda status=0: pytest.fail(f"{arguments} with {environ}: refused"))
        cli.main(list(arguments))
    [config] = found
    check_exposure(config)
    return config


Files = Mapping[str, Mapping[str, str]]
"""Of each ConfigMap: file names and texts."""


def of_container(
    container: dict[str, Any], pod: Pod, files: Files, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """The configuration of a server in a pod. `folder` is for the files that it mounts."""
    environ = IMAGE | {each["name"]: each.get("value", "a-secret") for each in container.get("env", ())}
    arguments = list(container["args"])
    if "sh" in container.get("command", ()):
        [command] = re.findall(r"penstock (serve .*)", arguments[0])
        arguments = shlex.split(command)
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        config_map = volumes[mount["name"]].get("configMap") if mount["name"] in volumes else None
        if config_map is not None:
            here = folder / mount["name"]
            here.mkdir(exist_ok=True)
            for name, text in files[config_map["name"]].items():
                (here / name).write_text(text)
            arguments = [each.replace(mount["mountPath"], str(here)) for each in arguments]
    return parsed(arguments, environ, monkeypatch)


def seconds_to_end(config: Config) -> float:
    """That a pod has to give its server after SIGTERM."""
    return config.server.drain_delay + config.server.drain_timeout + REST_SECONDS


def pause(container: dict[str, Any]) -> int:
    """Seconds before a container hears that its pod ends."""
    return int(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
