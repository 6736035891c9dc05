"""Does what deploy/docker/Dockerfile does for CPUs in a folder, since no images are built here:

    python tests/deploy/image_folder.py FOLDER

Runs the RUN lines of the stages that build, with the image's absolute paths below FOLDER. Users and system packages are
not made: those lines are left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
_STAGES = ("wheel", "environment-cpu")
_PATHS = re.compile(r"(?<![\w.$/])/(src|wheels|opt/penstock|cache|data|models)(?![\w])")


class Line(NamedTuple):
    stage: str
    instruction: str
    value: str


def lines(dockerfile: Path = DOCKERFILE) -> Iterator[Line]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stage = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            stage = value.rpartition(" AS ")[2]
        yield Line(stage, instruction, " ".join(value.split()))


def environment(stages: tuple[str, ...], folder: Path) -> dict[str, str]:
    """ENV and the defaults of ARG of these stages, with paths below `folder`."""
    found: dict[str, str] = {}
    for line in lines():
        if line.stage in stages and line.instruction in ("ENV", "ARG"):
            for name, value in re.findall(r"(\w+)=(\S+)", line.value):
                found[name] = _below(folder, value)
    return found


def _below(folder: Path, text: str) -> str:
    return _PATHS.sub(rf"{folder}/\1", text)


def build(folder: Path) -> None:
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment(_STAGES, folder)}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    source = folder / "src"
    source.mkdir(parents=True)
    for line in lines():
        if line.stage not in _STAGES:
            continue
        if line.instruction == "COPY":
            *names, target = line.value.split()
            for name in names:
                place = source / target
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
                else:
                    shutil.copy(ROOT / name, place)
        elif line.instruction == "RUN":
            subprocess.run(["sh", "-ec", _below(folder, line.value)], cwd=source, env=environ, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
