"""Triton's urls and environment variables in fsspec's terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.repository.storage import Repository
from penstock.gateway.models.repository.storage_cloud import CloudLocation, parse_url

AWS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_DEFAULT_REGION": "eu-west-1"}


def cloud(url: str, environ: dict[str, str] | None = None) -> CloudLocation:
    location = parse_url(url, environ or {})
    assert isinstance(location, CloudLocation)
    return location


@pytest.mark.parametrize(
    ("url", "protocol", "root", "extra", "options"),
    [
        ("s3://bucket", "s3", "bucket", "s3", {"client_kwargs": {}}),
        ("s3://bucket/path/to//models/", "s3", "bucket/path/to/models", "s3", {"client_kwargs": {}}),
        ("gs://bucket/models", "gcs", "bucket/models", "gcs", {}),
        (
            "as://account/container/models",
            "abfs",
            "container/models",
            "azure",
            {"account_name": "account", "anon": False},
        ),
        ("az://account/container", "abfs", "container", "azure", {"account_name": "account", "anon": False}),
        ("abfs://account/container", "abfs", "container", "azure", {"account_name": "account", "anon": False}),
        (
            "as://account.blob.core.windows.net/container",
            "abfs",
            "container",
            "azure",
            {"account_name": "account", "account_host": "account.blob.core.windows.net", "anon": False},
        ),
    ],
)
def test_a_url_names_store_root_extra_and_options(
    url: str, protocol: str, root: str, extra: str, options: dict[str, object]
) -> None:
    location = cloud(url)
    assert (location.protocol, location.root, location.extra, location.options) == (protocol, root, extra, options)


@pytest.mark.parametrize(
    ("url", "endpoint", "root"),
    [
        ("s3://localhost:9000/bucket/models", "http://localhost:9000", "bucket/models"),
        ("s3://http://10.0.0.1:9000/bucket", "http://10.0.0.1:9000", "bucket"),
        ("s3://https://minio.example:443/bucket/a/b", "https://minio.example:443", "bucket/a/b"),
    ],
)
def test_s3_at_a_host_of_its_own(url: str, endpoint: str, root: str) -> None:
    location = cloud(url)
    assert location.options["client_kwargs"] == {"endpoint_url": endpoint}
    assert location.options["config_kwargs"] == {"s3": {"addressing_style": "path"}}
    assert location.root == root


def test_credentials_of_s3() -> None:
    options = cloud("s3://bucket", AWS | {"AWS_SESSION_TOKEN": "token", "AWS_PROFILE": "unused"}).options
    assert options == {
        "client_kwargs": {"region_name": "eu-west-1"},
        "key": "AKID",
        "secret": "hush-hush",
        "token": "token",
    }
    assert cloud("s3://bucket", {"AWS_PROFILE": "mine"}).options == {"client_kwargs": {}, "profile": "mine"}


def test_credentials_of_google(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
    with pytest.raises(ConfigError, match=r"the key file .* is not there"):
        cloud("gs://b", environ)
    path.write_text("{}")
    assert cloud("gs://b", environ).options == {"token": str(path)}


def test_credentials_of_azure() -> None:
    environ = {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_KEY": "hush-hush"}
    assert cloud("as://account/c", environ).options == {"account_name": "account", "account_key": "hush-hush"}
    with pytest.raises(ConfigError, match="is not in the account"):
        cloud("as://other/c", environ)


def test_mount_directories() -> None:
    environ = {
        "TRITON_AWS_MOUNT_DIRECTORY": "/a",
        "TRITON_GCS_MOUNT_DIRECTORY": "/g",
        "TRITON_AZURE_MOUNT_DIRECTORY": "",
    }
    assert [cloud(url, environ).mount for url in ("s3://b", "gs://b", "as://a/c")] == ["/a", "/g", None]


@pytest.fixture
def credential_file(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "credentials.json"
    for name in ("default.json", "special.json"):
        (tmp_path / name).write_text("{}")
    path.write_text(
        json.dumps(
            {
                "gs": {"": f"{tmp_path}/default.json", "gs://special": f"{tmp_path}/special.json"},
                "s3": {
                    "s3://mine": {"key_id": "K1", "secret_key": "S1", "region": "us-east-1", "session_token": "T"},
                    "s3://mine/deeper": {"key_id": "K2", "secret_key": "S2"},
                    "s3://profiled": {"profile": "p"},
                    "s3://odd": ["K"],
                },
                "as": {"": {"account_str": "account", "account_key": "S3"}},
            }
        )
    )
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(path), **AWS}


def test_the_longest_beginning_in_the_credential_file_wins(credential_file: dict[str, str], tmp_path: Path) -> None:
    assert cloud("gs://other", credential_file).options == {"token": f"{tmp_path}/default.json"}
    assert cloud("gs://special/models", credential_file).options == {"token": f"{tmp_path}/special.json"}
    mine = cloud("s3://mine/models", credential_file).options
    assert (mine["key"], mine["secret"], mine["token"]) == ("K1", "S1", "T")
    assert cloud("s3://mine/deeper/models", credential_file).options["key"] == "K2"
    assert cloud("s3://profiled", credential_file).options["profile"] == "p"
    assert cloud("as://account/c", credential_file).options["account_key"] == "S3"


@pytest.mark.parametrize("url", ["s3://unknown", "s3://odd"])
def test_credential_files_without_a_fitting_entry(credential_file: dict[str, str], url: str) -> None:
    with pytest.raises(ConfigError, match="TRITON_CLOUD_CREDENTIAL_PATH"):
        cloud(url, credential_file)


@pytest.mark.parametrize("content", [None, "{", '{"s3": "x"}', "[]", "[" * 100_000])
def test_credential_files_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="TRITON_CLOUD_CREDENTIAL_PATH"):
        cloud("s3://bucket", {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/models",
        "s3://",
        "s3:///",
        "s3://https://host/bucket",
        "s3://bucket/../other",
        "gs://",
        "as://account",
        "as:///container",
        "s3://AKID:hush-hush@bucket",
        "as://account/container?sig=hush-hush",
        "gs://bucket\n",
    ],
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url, {})
    assert "hush-hush" not in str(caught.value)


def test_a_location_does_not_show_its_credentials() -> None:
    assert "hush-hush" not in repr(cloud("s3://bucket", AWS))


@pytest.mark.parametrize(
    ("url", "extra"), [("gs://bucket", "gcs"), ("as://account/container", "azure"), ("s3://b", "s3")]
)
def test_a_missing_client_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch, url: str, extra: str) -> None:
    def missing(protocol: str, **options: object) -> None:
        raise ImportError(f"no client for {protocol}")

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(ConfigError, match=rf"^{url} needs a package .* pip install 'penstock-server\[{extra}\]'$"):
        Repository(url)
