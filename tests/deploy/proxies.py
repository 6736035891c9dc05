"""The examples of deploy/proxies/ at work: the real programs, with other ports and a certificate of the test's own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from deploy.places import DEPLOY, program
from helpers_server import Server, wait_until
from helpers_tls import make_certificate


class Front(NamedTuple):
    """A proxy that runs, and the servers behind it."""

    url: str
    grpc: str
    certificate: Path
    servers: Sequence[Server]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def replaced(text: str, changes: dict[str, str]) -> str:
    """Fails where a place that the test must change is not in the example any more."""
    for old, new in changes.items():
        assert old in text, f"the example has no {old!r}"
        text = text.replace(old, new)
    return text


def upstreams(servers: Sequence[Server], form: str) -> dict[str, str]:
    """The addresses in the examples -> those of the servers. `form` has {} for the port."""
    ports = [(8000, 8001), (8100, 8101)]
    return {
        form.format(port): form.format(mine)
        for server, known in zip(servers, ports, strict=True)
        for port, mine in zip(known, (server.http_port, server.grpc.rpartition(":")[2]), strict=True)
    }


def nginx(folder: Path, servers: Sequence[Server], http: int, grpc: int) -> list[str]:
    scratch = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    changes = {
        "\nhttp {\n": f"\nhttp {{ access_log off; client_body_temp_path {folder}/body; {scratch}\n",
        "listen 443 ": f"listen {http} ",
        "listen 8443 ": f"listen {grpc} ",
        "/etc/nginx/tls/": f"{folder}/",
        **upstreams(servers, "127.0.0.1:{} "),
    }
    (folder / "nginx.conf").write_text(replaced((DEPLOY / "proxies/nginx.conf").read_text(), changes))
    options = f"daemon off; pid {folder}/nginx.pid;"
    return [program("nginx"), "-e", "stderr", "-p", str(folder), "-c", f"{folder}/nginx.conf", "-g", options]


def envoy(folder: Path, servers: Sequence[Server], http: int, grpc: int) -> list[str]:
    changes = {
        "port_value: 443}": f"port_value: {http}}}",
        "/etc/envoy/tls/": f"{folder}/",
        **upstreams(servers, "port_value: {}}}"),
    }
    (folder / "envoy.yaml").write_text(replaced((DEPLOY / "proxies/envoy.yaml").read_text(), changes))
    return [program("envoy"), "-c", f"{folder}/envoy.yaml", "--use-dynamic-base-id", "--log-level", "warning"]


def caddy(folder: Path, servers: Sequence[Server], http: int, grpc: int) -> list[str]:
    own = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    changes = {
        "\nllm.example.org {\n": f"\nlocalhost:{http} {{\n\ttls {folder}/server.pem {folder}/server.key\n",
        **upstreams(servers, "127.0.0.1:{}"),
    }
    (folder / "Caddyfile").write_text(own + replaced((DEPLOY / "proxies/Caddyfile").read_text(), changes))
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", f"{folder}/Caddyfile"]


Command = Callable[[Path, Sequence[Server], int, int], list[str]]
PROXIES: dict[str, Command] = {"nginx": nginx, "envoy": envoy, "caddy": caddy}
ONE_PORT = ("envoy", "caddy")
"""Those that tell gRPC from other requests by themselves."""


@contextmanager
def proxied(name: str, folder: Path, servers: Sequence[Server]) -> Iterator[Front]:
    make_certificate(folder, "server")
    http = free_port()
    grpc = http if name in ONE_PORT else free_port()
    command = PROXIES[name](folder, servers, http, grpc)
    environ = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        wait_until(lambda: process.poll() is not None or (is_open(http) and is_open(grpc)))
        assert process.poll() is None, (folder / "log").read_text()
        yield Front(f"https://localhost:{http}", f"localhost:{grpc}", folder / "server.pem", servers)
    finally:
        process.terminate()
        process.wait(20)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
