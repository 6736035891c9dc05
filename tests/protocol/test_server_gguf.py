"""`penstock serve model.gguf`: the demo model in the format of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cpu import own_cache
from support.fork import completed
from support.gguf import write_gguf
from support.server import Server, serving

DEMO = Path(__file__).parents[2] / "gateway" / "penstock" / "gateway" / "demo_model"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(DEMO, folder / "demo-q8.gguf", lambda name: "Q8_0")
    own_cache(folder / "cache")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder / "demo-q8.gguf"), environ={"XDG_CACHE_HOME": str(folder / "cache")}) as running:
        yield running


def test_a_chat(server: Server) -> None:
    [model] = server.client().models.list().data
    assert model.id == "demo-q8"
    answer = server.client().chat.completions.create(model=model.id, messages=QUESTION, temperature=0)
    assert answer.choices[0].finish_reason == "stop", "the file says which token ends an answer"
    assert "joins two or more path components" in (answer.choices[0].message.content or "")


def test_the_log_says_what_the_weights_are_kept_in(server: Server) -> None:
    assert "are quantized again, to int8" in "\n".join(server.log)


def test_the_next_start_finds_what_the_first_has_unpacked(server: Server, folder: Path) -> None:
    unpacked = folder / "cache" / "penstock" / "gguf"
    [before] = [(path.name, path.stat().st_mtime_ns) for path in unpacked.iterdir()]
    arguments = (str(folder), "--kv-cache-dtype", "u8-u4")
    with serving(*arguments, environ={"XDG_CACHE_HOME": str(folder / "cache")}) as again:
        [model] = again.client().models.list().data
        assert model.id == folder.name, "a folder with one file is called by its own name"
        answer = again.client().chat.completions.create(model=model.id, messages=QUESTION, temperature=0)
        assert "two or more path components" in (answer.choices[0].message.content or "")
        assert "kv u8-u4" in "\n".join(again.log)
    assert [(path.name, path.stat().st_mtime_ns) for path in unpacked.iterdir()] == [before]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "there is no file"),
        ("broken.gguf", "broken.gguf cannot be read as GGUF: it does not begin with GGUF"),
        ("two", "has several GGUF files: a.gguf, b.gguf; name the one to serve"),
    ],
)
def test_what_cannot_be_served_ends_the_server(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model" * 10)
    (tmp_path / "two").mkdir()
    for letter in "ab":
        (tmp_path / "two" / f"{letter}.gguf").write_bytes(b"GGUF")
    done = completed("serve", str(tmp_path / name), "--http-port", "0")
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_other_engines_refuse_it(folder: Path) -> None:
    done = completed("serve", str(folder / "demo-q8.gguf"), "--engine", "torch")
    assert "the torch engine does not read GGUF files; the openvino engine does" in done.stderr
