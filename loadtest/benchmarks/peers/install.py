"""Environments: one for each peer, complete or not there. uv fills them where it is found, else pip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from urllib.parse import unquote, urlsplit

from benchmarks.peers import recipes
from benchmarks.peers.catalog import TORCH, Peer
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.shell import run

_DISTRIBUTION = "penstock-server"
TORCH_HINT = (
    "; torch's build for CPUs is not on PyPI: name where it is, as PIP_FIND_LINKS=FOLDER or "
    "UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (with pip, PIP_EXTRA_INDEX_URL)"
)


def is_installed(peers_folder: PeersFolder, peer: Peer) -> bool:
    """As the catalog has it today."""
    try:
        record = json.loads(peers_folder.record(peer.name).read_text())
    except (OSError, ValueError):
        return False
    return bool(record == peer.pins)


def install(peers_folder: PeersFolder, peer: Peer) -> None:
    """Raises SetupError. What is half done is done again the next time."""
    if is_installed(peers_folder, peer):
        return
    environment = peers_folder.environment(peer.name)
    peers_folder.record(peer.name).unlink(missing_ok=True)
    log = peers_folder.log(f"setup-{peer.name}")
    log.unlink(missing_ok=True)
    if not peers_folder.program(peer.name).exists():
        shutil.rmtree(environment, ignore_errors=True)
        run([sys.executable, "-m", "venv", *(["--without-pip"] if _uv() else []), environment], log)
    packages = Installer(peers_folder, peer)
    recipes.RECIPES.get(peer.name, recipes.plain)(peers_folder, peer, packages)
    peers_folder.record(peer.name).write_text(json.dumps(peer.pins))


class Installer:
    """Installs packages into a peer's environment."""

    def __init__(self, peers_folder: PeersFolder, peer: Peer) -> None:
        self.log = peers_folder.log(f"setup-{peer.name}")
        self._python = peers_folder.program(peer.name)
        self._own = own_requirement() if peer.with_penstock else []

    def __call__(self, requirements: Sequence[str], *, dependencies: bool = True) -> None:
        """Raises SetupError."""
        flags = [] if dependencies else ["--no-deps"]
        for link in find_links():
            flags += ["--find-links", link]
        packages = [*requirements, *(self._own if dependencies else [])]
        run([*self._pip("install"), *flags, *packages], self.log, hint=TORCH_HINT if TORCH in requirements else "")

    def remove(self, package: str) -> None:
        run([*self._pip("uninstall"), *([] if _uv() else ["--yes"]), package], self.log)

    def _pip(self, command: str) -> list[str]:
        uv, python = _uv(), str(self._python)
        return [*uv, "pip", command, "--python", python] if uv else [python, "-m", "pip", command]


def own_requirement() -> list[str]:
    """Penstock as it is installed here (PEP 610): a folder, editable or not, or a version from an index."""
    own = distribution(_DISTRIBUTION)
    text = own.read_text("direct_url.json")
    if text is None:
        return [f"{_DISTRIBUTION}=={own.version}"]
    origin = json.loads(text)
    url = urlsplit(origin["url"])
    if url.scheme != "file":
        return [f"{_DISTRIBUTION} @ {origin['url']}"]
    editable = origin.get("dir_info", {}).get("editable", False)
    return [*(["-e"] if editable else []), unquote(url.path)]


def find_links() -> list[str]:
    """pip's, which uv does not read: from its variable or its configuration."""
    links = os.environ.get("PIP_FIND_LINKS")
    if links is None:
        argv = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
        links = subprocess.run(argv, capture_output=True, text=True).stdout
    return links.split()


def _uv() -> list[str]:
    path = shutil.which("uv")
    return [path] if path else []
