"""Engines and backends: which would run here, and why others would not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from penstock.classic.loading import backend_names
from penstock.engines.errors import PenstockError
from penstock.engines.host.failure_text import one_line
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.openvino.numerics import ModelFacts, Wish
from penstock.engines.openvino.trials import settle
from penstock.gateway.commands.doctor.findings import Finding

_DISTRIBUTION = "penstock-server"
_IMPORT_SECONDS = 120.0
"""For a package to be imported: torch and TensorFlow take seconds, on a busy machine many of them."""
_USUAL_HEAD = 64
"""Head size of a model whose attention is tried."""


@dataclass(frozen=True)
class _Package:
    """What an engine or a backend needs beside Penstock."""

    extra: str
    """Of this distribution; "": nothing more is needed."""
    modules: Sequence[str] = ()
    """Each is imported in a process of its own."""
    needs_gpu: bool = False


_ENGINES = {
    "torch": _Package("torch", ("torch", "transformers")),
    "vllm": _Package("vllm", ("vllm",)),
    "tensorrt_llm": _Package("tensorrt-llm", ("tensorrt_llm",), needs_gpu=True),
}
_BACKENDS = {
    "dali": _Package("dali", ("nvidia.dali",), needs_gpu=True),
    "fil": _Package("fil", ("xgboost", "lightgbm", "treelite")),
    "onnxruntime": _Package("onnx", ("onnxruntime",)),
    "pytorch": _Package("pytorch", ("torch",)),
    "tensorflow": _Package("tensorflow", ("tensorflow",)),
    "tensorrt": _Package("tensorrt", ("tensorrt",), needs_gpu=True),
}
"""Those that need a package; the others come with Penstock, or from a plugin."""


def engine_findings() -> Iterator[Finding]:
    yield _openvino()
    yield from _package_findings(_ENGINES)


def backend_findings() -> Iterator[Finding]:
    names = backend_names()
    yield from _package_findings({name: _BACKENDS.get(name, _Package("")) for name in names})


def _openvino() -> Finding:
    """With the trials that a start runs: they show whether this CPU computes what its instructions promise."""
    version = metadata.version("openvino")
    try:
        numerics = settle(Wish(), ModelFacts(head_size=_USUAL_HEAD))
    except PenstockError as error:
        return Finding("openvino", "problem", f"{version}: {error.message}", {"version": version})
    detail = f"{version}; computes in {numerics.words} ({numerics.reason})"
    return Finding("openvino", "ok", detail, {"version": version, "dtype": numerics.dtype})


def _package_findings(packages: dict[str, _Package]) -> Iterator[Finding]:
    with ThreadPoolExecutor(2) as imports:
        yield from imports.map(lambda item: _package_finding(*item), packages.items())


def _package_finding(name: str, package: _Package) -> Finding:
    if not package.extra:
        return Finding(name, "ok", "comes with Penstock" if name in ("identity", "openvino", "python") else "a plugin")
    install = f"pip install '{_DISTRIBUTION}[{package.extra}]'"
    requirements = _requirements(package.extra)
    versions = {requirement.name: _version(requirement.name) for requirement in requirements}
    missing = [needed for needed, version in versions.items() if version is None]
    if missing:
        needs_gpu = "; it needs a GPU as well" if package.needs_gpu and not visible_gpus() else ""
        return Finding(name, "note", f"{', '.join(missing)} not installed: {install}{needs_gpu}")
    listed = ", ".join(f"{needed} {version}" for needed, version in versions.items())
    wrong = [str(requirement) for requirement in requirements if not _fits(requirement, versions[requirement.name])]
    if wrong:
        return Finding(name, "problem", f"{listed}: Penstock needs {', '.join(wrong)}: {install}", versions)
    if package.needs_gpu and not visible_gpus():
        return Finding(name, "note", f"{listed}; needs a GPU, and none is visible", versions)
    for module in package.modules:
        fault = _import_fault(module)
        if fault:
            return Finding(name, "problem", f"{listed}: `import {module}` fails: {fault}", versions)
    return Finding(name, "ok", listed, versions)


def _requirements(extra: str) -> list[Requirement]:
    """What this distribution's extra installs on this machine."""
    try:
        lines = metadata.requires(_DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        lines = ()
    requirements = map(Requirement, lines)
    return [
        requirement
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _import_fault(module: str) -> str:
    """Why it cannot be imported, in a line; "": it can. A process of its own, because libraries may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_IMPORT_SECONDS:.0f} s"
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().rpartition("\n")[2]
    return one_line(last) or f"the process ends with status {done.returncode}"
