"""The examples of deploy/proxies/ at work: the real programs, with other ports and a certificate of the test's own."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from deploy.places import DEPLOY, program
from support.routers import running
from support.server import Server, free_port
from support.tls import make_certificate


class Front(NamedTuple):
    """A proxy, and the servers behind it."""

    http_port: int
    grpc_port: int
    folder: Path
    """Of its certificate, its log, and all that it writes."""
    servers: Sequence[Server]

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    def client(self, *, http2: bool = True) -> httpx.Client:
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.Client(base_url=f"https://localhost:{self.http_port}", http2=http2, timeout=60, verify=trusted)

    def serves(self) -> bool:
        with self.client() as asking:
            return asking.get("/health/ready").status_code == 200

    def num_running(self) -> int:
        """Requests in the servers' engines."""
        return sum(server.state()["num_running"] for server in self.servers)


def _nginx(front: Front) -> list[str]:
    folder = front.folder
    scratch = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    changes = {
        "events {\n": "user root;\nevents {\n",  # whom the folder belongs to
        "\nhttp {\n": f"\nhttp {{ access_log off; client_body_temp_path {folder}/body; {scratch}\n",
        "listen 443 ": f"listen {front.http_port} ",
        "listen 8443 ": f"listen {front.grpc_port} ",
        "/etc/nginx/tls/": f"{folder}/",
        **_upstreams(front, "127.0.0.1:{} "),
    }
    file = _example(front, "nginx.conf", changes)
    options = f"daemon off; pid {folder}/nginx.pid;"
    return [program("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(file), "-g", options]


def _envoy(front: Front) -> list[str]:
    changes = {
        "port_value: 443}": f"port_value: {front.http_port}}}",
        "/etc/envoy/tls/": f"{front.folder}/",
        **_upstreams(front, "port_value: {}}}"),
    }
    file = _example(front, "envoy.yaml", changes)
    return [program("envoy"), "-c", str(file), "--use-dynamic-base-id", "--log-level", "warning"]


def _caddy(front: Front) -> list[str]:
    folder = front.folder
    options = f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tstorage file_system {folder}\n}}\n"
    site = f"\nlocalhost:{front.http_port} {{\n\ttls {folder}/server.pem {folder}/server.key\n"
    file = _example(
        front, "Caddyfile", {"\nllm.example.org {\n": f"\n{options}{site}", **_upstreams(front, "127.0.0.1:{}")}
    )
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(file)]


PROXIES: dict[str, Callable[[Front], list[str]]] = {"nginx": _nginx, "envoy": _envoy, "caddy": _caddy}
_ONE_PORT = ("envoy", "caddy")
"""Those that tell gRPC from other requests by themselves."""


def _example(front: Front, name: str, changes: dict[str, str]) -> Path:
    """A copy with some places changed, which must be there."""
    text = (DEPLOY / "proxies" / name).read_text()
    for old, new in changes.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    copy = front.folder / name
    copy.write_text(text)
    return copy


def _upstreams(front: Front, form: str) -> dict[str, str]:
    """The addresses in the examples -> those of the servers. `form` has {} for the port."""
    known = [(8000, 8001), (8100, 8101)]
    mine = [(server.http_port, int(server.grpc.rpartition(":")[2])) for server in front.servers]
    pairs = [pair for both in zip(known, mine, strict=True) for pair in zip(*both, strict=True)]
    return {form.format(old): form.format(new) for old, new in pairs}


@contextmanager
def proxied(name: str, folder: Path, servers: Sequence[Server]) -> Iterator[Front]:
    """A proxy that serves: Envoy does so only when it knows that the servers are well."""
    make_certificate(folder, "server")
    port = free_port()
    front = Front(port, port if name in _ONE_PORT else free_port(), folder, servers)
    with running(PROXIES[name](front), folder / "log", front.serves):
        yield front
