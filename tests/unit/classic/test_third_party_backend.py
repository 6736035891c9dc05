"""A backend of another package: found by its entry point, run by the shim, shown in the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "third_party_backend"

SCRIPT = """
import asyncio, sys
from pathlib import Path

import numpy as np

from penstock.classic.base import ModelContext
from penstock.classic.messages import InferRequest
from penstock.classic.loading import load_model
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.classic.loading import backend_names, find_backend
from penstock.classic.tensors import Tensor

folder = Path(sys.argv[1])


async def infer(model, *numbers):
    array = np.array([numbers], np.float32)
    response = await model.infer(InferRequest(inputs={"INPUT": Tensor("INPUT", "FP32", array)}))
    return response.outputs[0].array.tolist()


async def main():
    backend = find_backend("scale")({"offset": "1"})
    config = ModelConfig(name="three", backend="scale", max_batch_size=8)
    config.instance_group.add(name="three_0", kind=ModelInstanceGroup.KIND_CPU, count=1)
    config.dynamic_batching.SetInParent()
    backend.auto_complete(config, folder / "1")
    context = ModelContext(
        name="three", version=1, config=config, model_folder=folder, version_folder=folder / "1", host=None
    )
    model = await load_model(context, backend)
    print("scale" in backend_names(), *await asyncio.gather(infer(model, 1, 2), infer(model, 5, 6)))
    await model.stop()


asyncio.run(main())
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What pip would have put on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    name, version = project["name"], project["version"]
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    entries = project["entry-points"]["penstock.backends"]
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[penstock.backends]", *lines]))
    (site / "penstock_scale.py").write_text((PACKAGE / "penstock_scale.py").read_text())
    return site


def test_it_is_found_and_run_beside_our_own(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / "factor.txt").write_text("3")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True [[4.0, 7.0]] [[16.0, 19.0]]"


def test_the_documentation_shows_this_one() -> None:
    text = (ROOT / "docs" / "backends.md").read_text()
    for file in ("penstock_scale.py", "pyproject.toml"):
        assert (PACKAGE / file).read_text().strip() in text, f"docs/backends.md has another {file}"
