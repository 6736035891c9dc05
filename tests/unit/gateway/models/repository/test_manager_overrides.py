"""Files of load requests stay in the folder that is made for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.repository.config_file import check_files, write_files
from support.repository import CONFIG, FakeLoader, FakeRepository, serving

ESCAPES = [
    "",
    ".",
    "1/",
    "/",
    "/../etc/passwd",
    "//etc/passwd",
    "1//model",
    "../1/model",
    "1/../../model",
    "1/..",
    "1/.",
    "1/./model",
    "1/a/../model",
    "..",
    "../../../../tmp/x/model",
    "1/a\\..\\..\\b",
    "1\\model",
    "1/a\0b",
    "1/a\nb",
    "1/a\x7f",
    "1/\ud800",
    "1/" + "a" * 256,
    "1/" + "é" * 128,
    "1/" + "a/" * 8 + "b",
    "labels.txt/",
    "./labels.txt",
    "../labels.txt",
    "warmup/../../sample",
    "warmup//sample",
    "warmup\\sample",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_files({"1/model.onnx": b"", path: b""})
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()


def test_code_for_the_server_s_own_process_does_not_come_with_a_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"backend\.py runs in the server's own process"):
        check_files({"1/model.py": b"", "backend.py": b""})
    with pytest.raises(InvalidRequestError, match=r"backend\.py runs in the server's own process"):
        check_files({"1/model.py": b"", "/backend.py": b""})


def test_a_slash_before_a_path_means_nothing() -> None:
    folder = write_files({"/1/model.py": b"code", "/etc/passwd": b"ours"})
    try:
        assert (folder.folder / "1/model.py").read_bytes() == b"code"
        assert (folder.folder / "etc/passwd").read_bytes() == b"ours"
    finally:
        folder.close()
    with pytest.raises(InvalidRequestError, match="conflicting paths"):
        write_files({"/1/model.py": b"", "1/model.py": b""})


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_is_written(temporary: Path) -> None:
    files = {
        "1/model.onnx": b"one",
        "1/data/weights 0.bin": b"\0\1",
        "12/...": b"",
        "1/%2e%2e": b"literal",
        "config.pbtxt": b"beside the request's",
        "labels.txt": b"cat",
        "warmup/sample": b"\0",
        "notes/.hidden é": b"",
        "0/no version": b"",
        "~/model": b"home",
        "file:1/model": b"",
    }
    model = write_files(files)
    assert temporary in model.folder.parents
    assert model.folder.stat().st_mode & 0o077 == 0
    found = {
        str(path.relative_to(model.folder)): path.read_bytes() for path in model.folder.rglob("*") if path.is_file()
    }
    assert found == files
    model.close()
    model.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("files", [["1/a", "1/a/b"], ["1/a/b", "1/a"], ["1/a/b/c", "1/a/b"]])
def test_files_in_each_others_way(temporary: Path, files: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="conflicting paths"):
        write_files(dict.fromkeys(files, b""))
    assert list(temporary.iterdir()) == []


def test_too_many_files() -> None:
    with pytest.raises(InvalidRequestError, match="more than 10000 files"):
        check_files({f"1/{number}": b"" for number in range(10_001)})


@given(st.dictionaries(st.text(st.sampled_from("1a./\\\0~ é")) | st.text(), st.binary(max_size=3), max_size=5))
def test_nothing_is_ever_written_outside(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as root:
        before, tempfile.tempdir = tempfile.tempdir, root
        try:
            model = write_files(files)
        except InvalidRequestError:
            assert list(Path(root).iterdir()) == []
        else:
            assert list(Path(root).iterdir()) == [model.folder]
            written = [path for path in model.folder.rglob("*") if path.is_file()]
            assert sorted(path.read_bytes() for path in written) == sorted(files.values())
            assert all(path.resolve().is_relative_to(model.folder.resolve()) for path in written)
        finally:
            tempfile.tempdir = before


@pytest.mark.parametrize("path", ESCAPES)
async def test_load_requests_with_such_paths(tmp_path: Path, path: str) -> None:
    repository, loader = FakeRepository(tmp_path), FakeLoader()
    async with serving(repository, loader=loader) as manager:
        start = "^failed to load 'a', failed to poll from model repository: the file path"
        with pytest.raises(InvalidRequestError, match=start):
            await manager.load("a", config=CONFIG, files={path: b"x"})
        assert manager.index(ready=False) == []
