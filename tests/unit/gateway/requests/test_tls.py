"""Which files TLS needs, and what is said of those that cannot be used."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.requests.tls import Certificates, ReloadedCertificates, TlsSettings
from support.tls import make_certificate, tls_settings, use_certificate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        make_certificate(folder, name)
    (folder / "text").write_text("no")
    (folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    encrypt = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-in", folder / "server.key", "-out", folder / "locked.key"], check=True)
    return folder


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "http-server-key: TLS needs this file"),
        ({"server_key": "server.key"}, "http-server-cert: TLS needs this file"),
        ({"server_key": "none", "server_cert": "server.pem"}, "http-server-key: the file cannot be read: No such"),
        ({"server_key": "server.key", "server_cert": "text"}, "http-server-cert: the file is no PEM file"),
        ({"server_key": "server.key", "server_cert": "broken.pem"}, "http-server-cert: the file has no certificate"),
        ({"server_key": "server.key", "server_cert": "server.key"}, "http-server-cert: the file has no certificate"),
        ({"server_key": "other.key", "server_cert": "server.pem"}, "http-server-cert: it cannot be used with http-s"),
        ({"server_key": "locked.key", "server_cert": "server.pem"}, "http-server-key: the key has a password"),
        ({"server_key": "server.key", "server_cert": "server.pem", "use_ssl_mutual": True}, "http-root-cert: TLS need"),
        (
            {"server_key": "server.key", "server_cert": "server.pem", "root_cert": "broken.pem"},
            "http-root-cert: the file has no certificate",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named_by_their_flag(files: dict[str, str | bool], said: str, made: Path) -> None:
    paths = {name: f"{made}/{file}" if isinstance(file, str) else file for name, file in files.items()}
    settings = TlsSettings(port="http", use_ssl=True, **paths)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        settings.read()
    assert str(caught.value).startswith(said)
    assert str(made) not in str(caught.value)


def test_nothing_below_tls_1_2(made: Path) -> None:
    assert tls_settings("http", made).read().context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_files_without_the_switch_are_noticed() -> None:
    assert TlsSettings(port="grpc", server_key="k").unused == "grpc-server-key"
    assert TlsSettings(port="grpc", server_key="k", use_ssl_mutual=True).unused == ""
    assert TlsSettings(port="grpc").unused == ""


async def test_files_that_change_are_read_without_being_told(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_certificate(tmp_path, made, "server")
    certificates = ReloadedCertificates(tls_settings("grpc", tmp_path), look_seconds=0.01)
    first = certificates.current
    found: asyncio.Queue[Certificates] = asyncio.Queue()
    following = asyncio.create_task(certificates.follow(found.put))
    (tmp_path / "server.key").write_text("half of a k")
    async with asyncio.timeout(20):
        while "the file is no PEM file; the grpc port keeps its certificate" not in caplog.text:
            await asyncio.sleep(0.01)
        assert certificates.current is first
        use_certificate(tmp_path, made, "other")
        new = await found.get()
    assert certificates.current is new
    assert new.cert == (made / "other.pem").read_bytes()
    following.cancel()


async def test_told_to_reload_files_are_read_once_more(made: Path) -> None:
    certificates = ReloadedCertificates(tls_settings("http", made), look_seconds=3600)
    found: asyncio.Queue[Certificates] = asyncio.Queue()
    following = asyncio.create_task(certificates.follow(found.put))
    certificates.reload()
    async with asyncio.timeout(20):
        assert (await found.get()).cert == certificates.current.cert
    following.cancel()
