"""EXECUTION_ENV_PATH: its interpreter, and the scripts that activate it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from penstock.classic.python.backend import PythonBackend
from penstock.classic.python.process import find_environment
from penstock.engines.errors import EngineError
from support.python_backend import ADD_SUB, ADD_SUB_CONFIG, loaded, parsed, write_model

VENV = """
VIRTUAL_ENV=/where/it/was/made
export VIRTUAL_ENV
PATH="$VIRTUAL_ENV/bin:$PATH"
export PATH
export SAID="two  words" ARGUMENTS="$#"
"""
CONDA_PACK = """
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ "$CONDA_PREFIX" = "$folder" ] && return 0
export CONDA_PREFIX="$folder"
PATH="$folder/bin:$PATH"
for script in "$folder"/etc/conda/activate.d/*; do . "$script"; done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an environment, with a name that shells take apart. Its interpreter is the tests' own."""
    found = tmp_path / "it's $HOME; *"
    (found / "bin").mkdir(parents=True)
    (found / "bin" / "python").symlink_to(sys.executable)
    return found


def activates(folder: Path, text: str) -> None:
    (folder / "bin" / "activate").write_text(text)


def add_conda_scripts(folder: Path) -> None:
    scripts = folder / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "a b.sh").write_text('export ORDER="$ORDER a" SEEN="$CONDA_PREFIX"\nfalse\n')
    (scripts / "c.sh").write_text('export ORDER="$ORDER c"\n')


def variables(place: Path) -> dict[str, str]:
    """Of a process in the environment."""
    environment = find_environment(str(place), place.parent)
    try:
        code = "import json, os; print(json.dumps(dict(os.environ)))"
        command = environment.command("-c", code)
        run = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, check=True)
    finally:
        environment.remove()
    found: dict[str, str] = json.loads(run.stdout)
    return found


def test_the_script_of_a_virtual_environment_is_sourced(folder: Path) -> None:
    activates(folder, VENV)
    found = variables(folder)
    assert (found["SAID"], found["ARGUMENTS"]) == ("two  words", "0")
    assert found["VIRTUAL_ENV"] == str(folder), "not the folder that it was made in"
    assert found["PATH"].startswith(f"{folder}/bin:")


def test_so_is_that_of_an_archive(folder: Path, tmp_path: Path) -> None:
    activates(folder, VENV)
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(folder, ".")
    found = variables(tmp_path / "env.tar.gz")
    assert found["SAID"] == "two  words"
    assert found["PATH"].startswith(f"{found['VIRTUAL_ENV']}/bin:")
    assert not Path(found["VIRTUAL_ENV"]).exists(), "it has been removed"


@pytest.mark.parametrize("script", [CONDA_PACK, VENV, None], ids=["conda-pack", "venv", "conda"])
def test_conda_s_scripts_are_sourced_once_and_in_order(folder: Path, script: str | None) -> None:
    add_conda_scripts(folder)
    if script is not None:
        activates(folder, script)
    found = variables(folder)
    assert found["ORDER"] == " a c"
    assert found["SEEN"] == found["CONDA_PREFIX"] == str(folder)
    assert found["PATH"].startswith(f"{folder}/bin:")


def test_without_scripts_no_shell_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    environment = find_environment(str(folder), folder.parent)
    assert environment.command("-c", "pass") == [f"{folder}/bin/python", "-c", "pass"]
    assert environment.variables()["VIRTUAL_ENV"] == str(folder)
    activates(folder, VENV)
    with pytest.raises(ValueError, match="no bash"):
        find_environment(str(folder), folder.parent)


def config(folder: Path) -> str:
    path = json.dumps(str(folder))
    return ADD_SUB_CONFIG + f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: {path} }} }}'


async def test_a_script_that_fails_is_told(folder: Path, tmp_path: Path) -> None:
    activates(folder, "return 3")
    with pytest.raises(EngineError, match=r"\(status 3\); what the scripts of EXECUTION_ENV_PATH have printed is in"):
        async with loaded(tmp_path, ADD_SUB, config(folder)):
            pass


def test_a_script_that_does_not_end_is_ended(folder: Path, tmp_path: Path) -> None:
    activates(folder, f"echo $$ >{tmp_path}/pid; sleep 1000")
    backend = PythonBackend({"stub-timeout-seconds": "1"})
    code = ADD_SUB + "    auto_complete_config = None\n"
    with pytest.raises(ValueError, match="did not start within 1 s; --backend-config=python,stub-timeout-seconds"):
        backend.auto_complete(parsed(config(folder)), write_model(tmp_path, code))
    if (tmp_path / "pid").exists():  # it had begun
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
