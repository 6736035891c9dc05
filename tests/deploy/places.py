"""The files of deploy/, and the programs that read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def program(name: str) -> str:
    """Its path. `.ci/deploy` has them all, and runs what is skipped elsewhere."""
    if os.environ.get("DEPLOY_TOOLS") != "all":
        pytest.skip("a test of .ci/deploy")
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def run(*command: str | Path, **options: Any) -> str:
    """What it prints. Fails with that, where the command does."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}"
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


Pod = dict[str, Any]


def pods(resource: dict[str, Any]) -> Iterator[tuple[str, Pod]]:
    """The pods that a resource makes: a name, and their `spec`."""
    kind, name, spec = resource["kind"], resource["metadata"]["name"], resource.get("spec", {})
    if kind == "Deployment":
        yield name, spec["template"]["spec"]
    elif kind == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        yield f"{name} leader", group["leaderTemplate"]["spec"]
        yield f"{name} worker", group["workerTemplate"]["spec"]
    elif kind == "ServingRuntime":
        yield name, {field: spec[field] for field in ("containers", "volumes")}
    elif kind == "LLMInferenceServiceConfig":
        yield name, spec["template"]


def is_ours(container: dict[str, Any]) -> bool:
    """Whether it runs a Penstock server."""
    return "penstock:" in container.get("image", "") and "serve" in " ".join(container.get("args", ()))
