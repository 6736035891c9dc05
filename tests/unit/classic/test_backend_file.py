"""Backends that are a backend.py: whose file counts, what is told of a bad one, and that changes are taken in."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.classic.base import Backend
from penstock.classic.identity import IdentityBackend
from penstock.classic.loading import load_backend_file
from penstock.classic.model_config import ModelConfig
from penstock.gateway.models.repository.classic_loader import ClassicLoader, ClassicLoaders, FileLoader

BACKEND = """
from penstock.classic.base import Backend
VALUE = {value}

class Mine(Backend):
    value = VALUE

    def load_model(self, context):
        raise ValueError("no models")
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backend.py").write_text(text)
    return folder / "backend.py"


def backend_of(loader: object) -> Backend:
    assert isinstance(loader, ClassicLoader)
    return loader._backend


def test_a_file_is_run_again_each_time_and_leaves_no_bytecode(tmp_path: Path) -> None:
    values = []
    for value in (1, 2):  # of the same size, within the same second
        path = write(tmp_path, BACKEND.format(value=value))
        values.append(load_backend_file(path, "model 'm'").value)  # type: ignore[attr-defined]
    assert values == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["backend.py"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\nclass", r"backend\.py of model 'm' cannot be loaded: line 2: invalid syntax"),
        ("\nimport nothing_of_the_kind", "line 2: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("open(__file__ + 'x')", r"FileNotFoundError: .*No such file or directory: 'backend\.pyx'"),
        ("import sys\nsys.exit('no licence')", "line 2: SystemExit: no licence"),
        ("x = 1", "must define one class that derives from Backend, and has none"),
        (BACKEND.format(value=1) + "class Other(Mine): pass", "and has Mine, Other"),
        ("from penstock.classic.identity import IdentityBackend", "and has none"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_no_folder(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=told) as error:
        load_backend_file(path, "model 'm'")
    assert str(tmp_path) not in str(error.value)


def test_whose_file_counts(tmp_path: Path) -> None:
    """The model's own before the one of the folder for all; a plugin's name is the plugin's."""
    model, directory = tmp_path / "models" / "m", tmp_path / "backends"
    write(directory / "mine", BACKEND.format(value="'of all'"))
    write(directory / "identity", BACKEND.format(value="'not used'"))
    model.mkdir(parents=True)
    loaders = ClassicLoaders({"python": {"backend-directory": str(directory)}, "mine": {"key": "1"}})
    found = backend_of(loaders("mine", model))
    assert (found.value, found.options) == ("of all", {"key": "1"})  # type: ignore[attr-defined]
    write(model, BACKEND.format(value="'own'"))
    assert backend_of(loaders("mine", model)).value == "own"  # type: ignore[attr-defined]
    assert backend_of(loaders("another", model)).value == "own"  # type: ignore[attr-defined]
    assert isinstance(backend_of(loaders("identity", model)), IdentityBackend)
    with pytest.raises(ValueError, match="no backend is called 'another'"):
        loaders("another", tmp_path)


@pytest.mark.parametrize("filename", ["backend.py", "model.py"])
def test_a_name_that_is_a_path_leads_to_no_file(tmp_path: Path, filename: str) -> None:
    write(tmp_path / "elsewhere", "raise RuntimeError").rename(tmp_path / "elsewhere" / filename)
    (tmp_path / "backends").mkdir()
    loaders = ClassicLoaders({"python": {"backend-directory": str(tmp_path / "backends")}})
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), "..", "x" * 300):
        with pytest.raises(ValueError, match="no backend is called"):
            loaders(name, tmp_path)


def test_another_runtime_is_refused(tmp_path: Path) -> None:
    write(tmp_path, BACKEND.format(value=1))
    loader = ClassicLoaders({})("mine", tmp_path)
    assert isinstance(loader, FileLoader)
    loader.auto_complete(ModelConfig(name="m", runtime="backend.py"), tmp_path)
    with pytest.raises(ValueError, match=r"is a backend\.py and has no runtime 'libmine\.so'"):
        loader.auto_complete(ModelConfig(name="m", runtime="libmine.so"), tmp_path)
