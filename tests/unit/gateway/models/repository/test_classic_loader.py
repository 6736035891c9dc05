"""Which backend a name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.classic.base import Backend
from penstock.classic.identity import IdentityBackend
from penstock.classic.python.backend import PythonBackend
from penstock.gateway.models.repository.classic_loader import ClassicLoader, ClassicLoaders


def backend_of(loader: object) -> Backend:
    assert isinstance(loader, ClassicLoader)
    return loader._backend


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name in ("mine", "identity"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text("class TritonPythonModel: pass\n")
    return tmp_path


def test_a_name_stands_for_its_plugin() -> None:
    assert isinstance(backend_of(ClassicLoaders({})("identity")), IdentityBackend)


def test_a_program_in_the_backend_directory_is_a_backend(programs: Path) -> None:
    loaders = ClassicLoaders({"python": {"backend-directory": str(programs)}})
    assert isinstance(backend_of(loaders("mine")), PythonBackend)
    assert isinstance(backend_of(loaders("identity")), IdentityBackend)


def test_unknown_names_are_refused_with_the_known_ones(programs: Path) -> None:
    loaders = ClassicLoaders({"python": {"backend-directory": str(programs)}})
    with pytest.raises(ValueError, match="no backend is called 'other'; there are dali, fil, identity, onnx"):
        loaders("other")


def test_options_for_all_backends_reach_each() -> None:
    loader = ClassicLoaders({"": {"default-max-batch-size": "8"}, "python": {"stub-timeout-seconds": "7"}})("python")
    assert backend_of(loader).options == {"default-max-batch-size": "8", "stub-timeout-seconds": "7"}
