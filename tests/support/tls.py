"""Certificates for tests, and what a port shows of its own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, Literal

from penstock.gateway.requests.tls import TlsSettings


def make_certificate(folder: Path, name: str) -> None:
    """A key, NAME.key, and a self-signed certificate for localhost, NAME.pem, which is its own authority."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
    subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)


def use_certificate(folder: Path, source: Path, name: str) -> None:
    """Puts NAME's key and certificate in the place of the server's, as a tool that renews them would."""
    for kind in ("key", "pem"):
        shutil.copy(source / f"{name}.{kind}", folder / f"new.{kind}")
        (folder / f"new.{kind}").replace(folder / f"server.{kind}")


def tls_settings(port: Literal["http", "grpc"], folder: Path, **options: Any) -> TlsSettings:
    files = {"server_cert": f"{folder}/server.pem", "server_key": f"{folder}/server.key"}
    return TlsSettings(port=port, **{"use_ssl": True, **files, **options})


def client_context(trusted: Path, certificate: Path | None = None) -> ssl.SSLContext:
    """Of a client that trusts this server's certificate, and shows its own (NAME.pem, beside NAME.key)."""
    context = ssl.create_default_context(cafile=str(trusted))
    if certificate is not None:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context


def shown_certificate(port: int) -> str:
    """What a new connection gets to see, as PEM."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=20)
