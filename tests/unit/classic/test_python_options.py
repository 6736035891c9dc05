"""Options and environments of the python backend."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest

from penstock.classic.python.backend import PythonBackend
from penstock.classic.python.process import PythonOptions, find_environment, lines_of


def test_triton_s_options() -> None:
    options = {
        "shm-default-byte-size": "8388608",
        "shm-growth-byte-size": "67108864",
        "shm-region-prefix-name": "mine",
        "stub-timeout-seconds": "120",
        "default-max-batch-size": "4",
    }
    found = PythonOptions.parse(options)
    assert found.shm_default_byte_size == 8388608
    assert found.shm_growth_byte_size == 67108864
    assert found.shm_region_prefix_name == "mine"
    assert found.stub_timeout_seconds == 120


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("nothing", "1", "the python backend has no option 'nothing'"),
        ("shm-default-byte-size", "-1", "must be an integer from 4096 to"),
        ("shm-growth-byte-size", "1e9", "must be an integer from 4096 to"),
        ("stub-timeout-seconds", "0", "must be an integer from 1 to"),
        ("stub-timeout-seconds", "٣", "must be an integer from 1 to"),
        ("shm-region-prefix-name", "a\nb", "printable"),
        ("shm-region-prefix-name", "", "printable"),
    ],
)
def test_other_options_are_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PythonBackend({name: value})


def test_the_server_s_own_interpreter() -> None:
    found = find_environment("", Path("/nowhere"))
    assert found.python == Path(sys.executable)
    assert found.variables()["PATH"] == os.environ["PATH"]


def environment_in(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").symlink_to(sys.executable)
    return folder


def test_a_folder_in_the_model_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment_in(tmp_path / "env")
    found = find_environment("$$TRITON_MODEL_DIRECTORY/env", tmp_path)
    assert found.python == tmp_path / "env" / "bin" / "python3"
    variables = found.variables()
    assert variables["PATH"].startswith(f"{tmp_path / 'env' / 'bin'}:")
    assert variables["VIRTUAL_ENV"] == str(tmp_path / "env")
    assert "PYTHONPATH" not in variables


def test_a_conda_environment(tmp_path: Path) -> None:
    (environment_in(tmp_path) / "conda-meta").mkdir()
    assert find_environment(str(tmp_path), tmp_path).variables()["CONDA_PREFIX"] == str(tmp_path)


def test_an_archive_is_unpacked_and_removed(tmp_path: Path) -> None:
    environment_in(tmp_path / "env")
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "env", ".")
    found = find_environment(str(tmp_path / "env.tar.gz"), tmp_path)
    assert found.unpacked is not None
    assert os.access(found.python, os.X_OK)
    found.remove()
    assert not found.unpacked.exists()


def test_environments_that_are_none(tmp_path: Path) -> None:
    """Report server#3222: a path of another machine, or of the container's outside."""
    (tmp_path / "file.tar").write_text("no archive")
    (tmp_path / "empty").mkdir()
    for path, text in (
        ("/nowhere", "names no folder and no archive: '/nowhere'$"),
        ("$$TRITON_MODEL_DIRECTORY/gone", r"no archive: '\$\$TRITON_MODEL_DIRECTORY/gone'$"),
        (
            "gone.tar.gz",
            r"'gone.tar.gz', seen from .*; in the model's folder it is \$\$TRITON_MODEL_DIRECTORY/gone.tar",
        ),
        (str(tmp_path / "file.tar"), "cannot be unpacked"),
        (str(tmp_path / "empty"), "has no bin/python"),
    ):
        with pytest.raises(ValueError, match=text):
            find_environment(path, tmp_path)


def test_archives_do_not_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(tmp_path / "evil", "../../evil-elsewhere")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        find_environment(str(tmp_path / "env.tar"), tmp_path)


def test_lines_of_the_log() -> None:
    assert lines_of(b"plain\n") == ["plain"]
    assert lines_of(b"\xff\ttab\x00\r") == ["�\ttab�"]
    assert [len(line) for line in lines_of(b"x" * 20_000)] == [8192, 8192, 3616]
