"""`penstock pull`, `list` and `rm` against a hub of the tests' own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fork import ForkedProcess
from support.hub import Hub, commit, serving_hub
from support.server import serving, wait_until

DEMO = Path(__file__).parents[2] / "gateway" / "penstock" / "gateway" / "demo_model"
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix in (".json", ".safetensors")}
OLD = FILES | {"model.safetensors": b"z" * (3 << 20)}


class Shell:
    """Runs commands with the hub and a cache of their own."""

    def __init__(self, hub: Hub, cache: Path) -> None:
        self.hub = hub
        self.cache = cache
        self.environ = hub.environ(cache)

    def start(self, *arguments: str) -> ForkedProcess:
        return ForkedProcess(arguments, os.environ | self.environ, stdout=True)

    def run(self, *arguments: str, status: int = 0) -> str:
        """What it prints; where `status` is one of a failure, what it complains of."""
        process = self.start(*arguments)
        out, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "Traceback" not in errors
        return errors if status else out

    def listed(self) -> list[list[str]]:
        """Cells of the rows without their heading."""
        heading, *rows = self.run("list").splitlines()
        assert heading.split() == ["ID", "REVISION", "COMMIT", "SIZE", "CHANGED"]
        return [row.split() for row in rows]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with serving_hub(FILES, old=OLD) as hub:
        yield Shell(hub, tmp_path / "cache")


def test_what_is_pulled_is_listed_and_served_without_the_hub(shell: Shell) -> None:
    assert shell.listed() == []
    folder = Path(shell.run("pull", "org/small").strip())
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert [row[:3] for row in shell.listed()] == [["org/small", "main", commit("main")[:12]]]
    assert Path(shell.run("pull", "org/small").strip()) == folder
    offline = shell.environ | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    with serving("org/small", environ=offline) as server:
        assert [model.id for model in server.client().models.list()] == ["org/small"]


def test_revisions_are_pulled_listed_and_removed_one_by_one(shell: Shell) -> None:
    shell.run("pull", "org/small")
    folder = Path(shell.run("pull", "org/small", "--revision", "old").strip())
    assert (folder / "model.safetensors").stat().st_size == 3 << 20
    assert sorted(row[:3] for row in shell.listed()) == [
        ["org/small", "main", commit("main")[:12]],
        ["org/small", "old", commit("old")[:12]],
    ]
    refused = shell.run("rm", "org/small", "--revision", "new", status=1)
    assert refused == "penstock: org/small is not here with the revision new\n"
    assert shell.run("rm", "org/small", "--revision", commit("old")[:12]) == "3 MiB are free again\n"
    assert [row[1] for row in shell.listed()] == ["main"]
    assert not folder.exists()
    shell.run("rm", "org/small")
    assert shell.listed() == []
    assert shell.run("rm", "org/small", status=1) == "penstock: org/small is not here\n"


def test_a_server_has_the_revision_that_it_is_told(shell: Shell) -> None:
    flags = ("org/small", "--engine", "simulated", "--revision", "old")
    with serving(*flags, environ=shell.environ):
        assert [row[1] for row in shell.listed()] == ["old"]


def test_files_that_revisions_share_stay_for_the_other(shell: Shell) -> None:
    shell.run("pull", "org/small", "--revision", "old")
    folder = Path(shell.run("pull", "org/small").strip())
    shell.run("rm", "org/small", "--revision", "old")
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["org/absent"], "penstock: org/absent is neither a folder or file here nor a model of the hub\n"),
        (["org/small", "--revision", "new"], "penstock: org/small has no such revision\n"),
        (["./folder"], "penstock: ./folder is no model of the hub\n"),
        (["penstock-demo"], "penstock: penstock-demo is no model of the hub\n"),
    ],
)
def test_what_cannot_be_pulled(shell: Shell, arguments: list[str], message: str) -> None:
    assert shell.run("pull", *arguments, status=1) == message
    assert shell.listed() == []


def test_a_hub_that_is_away_is_told_in_one_line(shell: Shell) -> None:
    shell.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    message = shell.run("pull", "org/small", status=1)
    assert message.startswith("penstock: org/small cannot be downloaded: ")
    assert message.count("\n") == 1


def test_an_interrupted_pull_is_taken_up_again(shell: Shell) -> None:
    shell.hub.open.clear()
    pulling = shell.start("pull", "org/small")
    wait_until(lambda: any(path.suffix == ".incomplete" for path in shell.cache.rglob("*")))
    pulling.send_signal(signal.SIGINT)
    _, errors = pulling.communicate(timeout=60)
    assert pulling.returncode == 130
    assert "Traceback" not in errors
    shell.hub.open.set()
    folder = Path(shell.run("pull", "org/small").strip())
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
