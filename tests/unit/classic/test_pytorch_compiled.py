"""An AOTInductor package under the pytorch backend.

Compiling it takes minutes: only where PENSTOCK_AOT_INDUCTOR is set, as .ci/backends does.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from backend_candidates.candidate import LOOKUP, beyond_the_table, lookup_answer, lookup_rows
from backend_candidates.pytorch import Lookup
from penstock.classic.base import BackendInstance
from penstock.classic.pytorch.backend import PyTorchBackend
from penstock.engines.errors import InvalidRequestError
from support.backends import load, model_config, run

pytestmark = [
    pytest.mark.skipif("PENSTOCK_AOT_INDUCTOR" not in os.environ, reason="takes minutes: PENSTOCK_AOT_INDUCTOR=1"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("m") / "1"
    found.mkdir()
    batch = {0: torch.export.Dim("batch", max=64)}
    examples = (torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64))
    program = torch.export.export(Lookup(3).eval(), examples, dynamic_shapes=(batch, batch))
    torch._inductor.aoti_compile_and_package(program, package_path=str(found / "model.pt2"))
    return found


def loaded(folder: Path, config: str) -> BackendInstance:
    return load(PyTorchBackend({}), model_config(config), folder)


def test_a_package_answers_as_its_module(folder: Path) -> None:
    instance = loaded(folder, LOOKUP)
    for count in (1, 2, 8):
        rows = lookup_rows(np.random.default_rng(0), count)
        found = run(instance, **rows)
        for name, array in lookup_answer(rows, 3).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6)
    with pytest.raises(InvalidRequestError, match="out of bounds"):
        run(instance, **beyond_the_table())


def test_its_inputs_may_be_named_by_index(folder: Path) -> None:
    config = LOOKUP.replace('"INPUT0"', '"x__0"').replace('"INDEX"', '"x__1"')
    rows = lookup_rows(np.random.default_rng(0), 2)
    found = run(loaded(folder, config), x__1=rows["INDEX"], x__0=rows["INPUT0"])
    np.testing.assert_allclose(found["OUTPUT1"], lookup_answer(rows, 3)["OUTPUT1"], rtol=1e-6)


def test_it_does_not_tell_its_shapes(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"needs its inputs and outputs .*'model\.pt2' \(AOTInductor\)"):
        loaded(folder, "max_batch_size: 8")
