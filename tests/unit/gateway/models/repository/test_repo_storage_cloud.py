"""Repositories in object storage: over fsspec's memory file system, and over S3 as moto serves it."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.models.repository.storage import Repository
from penstock.gateway.models.repository.storage_cloud import CloudLocation, CloudStorage

FILES = {
    "config.pbtxt": b'backend: "python"',
    "1/model.py": b"pass",
    "1/deep/er/data": b"\0" * 1000,
    "1/[a]*?.bin": b"*",
}


@pytest.fixture
def bucket() -> str:
    """The memory file system is one for the whole process."""
    return f"bucket-{uuid.uuid4().hex}"


def storage(bucket: str, files: dict[str, bytes], **location: Any) -> CloudStorage:
    filesystem = MemoryFileSystem()
    for path, data in files.items():
        filesystem.pipe_file(f"/{bucket}/models/{path}", data)
    where = CloudLocation("s3://b/models", "memory", f"{bucket}/models", "s3", **location)
    return CloudStorage(where, filesystem)


def add_sub() -> dict[str, bytes]:
    return {f"add_sub/{path}": data for path, data in FILES.items()}


def test_only_folders_are_listed_as_models(bucket: str) -> None:
    found = storage(bucket, add_sub() | {"other/config.pbtxt": b"", "README.md": b""})
    assert found.names() == ["add_sub", "other"]


def test_a_model_is_copied_to_a_private_folder(bucket: str, tmp_path: Path) -> None:
    folder = storage(bucket, add_sub() | {"add_sub2/x": b""}, mount=str(tmp_path)).fetch("add_sub")
    assert folder.name == "add_sub"
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert folder.parent.parent == tmp_path


def test_a_fingerprint_changes_with_a_file_and_with_a_new_one(bucket: str) -> None:
    found = storage(bucket, add_sub())
    before = found.fingerprint("add_sub")
    assert found.fingerprint("add_sub") == before
    MemoryFileSystem().pipe_file(f"/{bucket}/models/add_sub/1/model.py", b"more than before")
    after = found.fingerprint("add_sub")
    assert after != before
    MemoryFileSystem().pipe_file(f"/{bucket}/models/add_sub/2/model.py", b"")
    assert found.fingerprint("add_sub") not in (before, after)


def test_nothing_there(bucket: str, tmp_path: Path) -> None:
    found = storage(bucket, {"add_sub/x": b""}, mount=str(tmp_path))
    for call in (found.fetch, found.fingerprint):
        with pytest.raises(ModelNotFoundError):
            call("nothing")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="there is nothing at s3://b/models"):
        storage(f"{bucket}-2", {}).names()


class Hostile:
    """A store with keys that no file system would take."""

    def __init__(self, *keys: str, error: Exception | None = None) -> None:
        self.keys = keys
        self.error = error

    def invalidate_cache(self) -> None:
        pass

    def find(self, prefix: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        if self.error:
            raise self.error
        return {f"{prefix}/{key}": {"name": f"{prefix}/{key}", "type": "file", "size": 2**60} for key in self.keys}

    def get(self, sources: list[str], targets: list[str]) -> None:
        raise AssertionError("nothing may be copied")


@pytest.mark.parametrize("key", ["../../x", "1/../../x", "a//b", "./x", "x" * 256, "a\0b", "1/.."])
def test_keys_that_lead_out_of_the_copy_are_refused(tmp_path: Path, key: str) -> None:
    location = CloudLocation("s3://b", "s3", "b", "s3", mount=str(tmp_path))
    with pytest.raises(InvalidRequestError, match="whose path cannot be on a disk"):
        CloudStorage(location, Hostile(key)).fetch("add_sub")
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_the_disk_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    location = CloudLocation("s3://b", "s3", "b", "s3", mount=str(tmp_path))
    with pytest.raises(EngineError, match="more than there is free disk space"):
        CloudStorage(location, Hostile("1/model")).fetch("add_sub")
    assert list(tmp_path.iterdir()) == [], "the folder for the copy is removed"


def test_a_mount_directory_that_is_not_there() -> None:
    location = CloudLocation("s3://b", "s3", "b", "s3", mount="/nonexistent")
    with pytest.raises(EngineError, match="no folder for a copy"):
        CloudStorage(location, Hostile("1/model")).fetch("add_sub")


def test_errors_of_a_store_carry_the_url_and_no_credentials() -> None:
    options = {"key": "AKID", "secret": "hush-hush", "token": "tick-et"}
    location = CloudLocation("s3://b", "s3", "b", "s3", options)
    error = RuntimeError("signature of AKID with hush-hush and tick-et\nand a second line")
    with pytest.raises(EngineError) as caught:
        CloudStorage(location, Hostile(error=error)).fingerprint("add_sub")
    assert caught.value.message == "s3://b cannot be read: RuntimeError: signature of *** with *** and ***"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path))
    client = boto3.client("s3", endpoint_url=f"http://{s3}")
    client.create_bucket(Bucket=bucket)
    for path, data in add_sub().items():
        client.put_object(Bucket=bucket, Key=f"models/{path}", Body=data)
    client.put_object(Bucket=bucket, Key="models/marked/", Body=b"")  # as consoles make a folder
    client.put_object(Bucket=bucket, Key="models/marked/config.pbtxt", Body=b"")
    return f"s3://{s3}/{bucket}/models"


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_models_in_s3_are_copied_here_and_the_copy_goes_when_closed(s3_url: str, scheme: str, tmp_path: Path) -> None:
    repository = Repository(s3_url.replace("s3://", f"s3://{scheme}"))
    assert repository.model_names() == ["add_sub", "marked"]
    model = repository.fetch("add_sub")
    found = {
        str(path.relative_to(model.folder)): path.read_bytes() for path in model.folder.rglob("*") if path.is_file()
    }
    assert found == FILES
    assert model.folder.parent.parent == tmp_path
    model.close()
    assert list(tmp_path.iterdir()) == []
    marked = repository.fetch("marked")
    assert [path.name for path in marked.folder.iterdir()] == ["config.pbtxt"]
    marked.close()


def test_s3_sees_changes_of_others_at_once(s3: str, s3_url: str, bucket: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://{s3}")
    repository = Repository(s3_url)
    before = repository.fingerprint("add_sub")
    assert repository.fingerprint("add_sub") == before
    client.put_object(Bucket=bucket, Key="models/add_sub/1/model.py", Body=b"PASS")  # as long as before
    assert repository.fingerprint("add_sub") != before
    client.put_object(Bucket=bucket, Key="models/new/config.pbtxt", Body=b"")
    assert repository.model_names() == ["add_sub", "marked", "new"]
    with pytest.raises(ModelNotFoundError):
        repository.fetch("nothing")


def test_s3_errors(s3_url: str, bucket: str) -> None:
    repository = Repository(s3_url.replace(bucket, "there-is-no-such-bucket"))
    with pytest.raises(EngineError) as caught:
        repository.model_names()
    assert "there-is-no-such-bucket" in caught.value.message
    assert "hush-hush" not in caught.value.message
