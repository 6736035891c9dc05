"""The folder that holds everything of the peers: environments, models, logs."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.peers.catalog import LLAMA_CPP
from penstock.loadtest.errors import LoadTestError

FOREIGN = Path(__file__).parent / "foreign"
"""Programs that the peers' own interpreters run; nothing of it is imported here."""


class PeersFolder:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For one command at a time: two would write the same files, and measure each other. Raises LoadTestError."""
        path = self.root / "lock"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = path.open("wb")
        except OSError as error:
            raise LoadTestError(f"dir: {path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LoadTestError(f"dir: another command is at work in {self.root}") from None
            yield

    def environment(self, peer: str) -> Path:
        return self.root / "venvs" / peer

    def record(self, peer: str) -> Path:
        """Stands beside a complete environment and holds what was asked for."""
        return self.root / "venvs" / f"{peer}.json"

    def program(self, peer: str, name: str = "python") -> Path:
        return self.environment(peer) / "bin" / name

    def packages(self, peer: str) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.environment(peer) / "lib" / version / "site-packages"

    def versions(self, peer: str) -> dict[str, str]:
        """Of the packages that are installed for a peer, by their names in small letters."""
        installed = distributions(path=[str(self.packages(peer))])
        return {package.metadata["Name"].lower(): package.version for package in installed}

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def converted(self, name: str, form: str) -> Path:
        """`ov` and `ov-int4`: OpenVINO's IR, a folder; `gguf` and `Q4_K_M.gguf`: a file; `mmproj.gguf`: an encoder of
        images; `w8a8`: a checkpoint."""
        return self.root / "models" / (f"{name}.gguf" if form == "gguf" else f"{name}-{form}")

    def repository(self, name: str) -> Path:
        """A Triton model repository."""
        return self.root / "repositories" / name

    def log(self, name: str) -> Path:
        path = self.root / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def sources(self) -> Path:
        return self.root / "src"

    @property
    def backends(self) -> Path:
        """Triton's."""
        return self.root / "triton_backends"

    @property
    def llama_server(self) -> Path:
        """In its build, which is of one version."""
        return self.root / LLAMA_CPP.replace("==", "-") / "bin" / "llama-server"
