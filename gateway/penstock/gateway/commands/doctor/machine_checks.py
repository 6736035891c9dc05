"""The machine: CPU, memory and how fast it is read, GPUs, limits, ports, folders."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.engines.host.cores import usable_cores
from penstock.engines.host.cpu import this_cpu
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.machine_facts import total_memory
from penstock.engines.host.memory import available_memory
from penstock.engines.host.read_speed import read_speeds
from penstock.engines.host.user_cache import user_cache
from penstock.gateway.commands.doctor.findings import Finding, size_text
from penstock.gateway.configuration.config import Config

_CLASSES = (
    ("AMX", ("amx_tile", "amx_int8", "amx_bf16")),
    ("AVX-512 with bf16", ("avx512f", "avx512_bf16")),
    ("AVX-512 with VNNI", ("avx512f", "avx512_vnni")),
    ("AVX-512", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    ("AVX2 with VNNI", ("avx2", "avx_vnni")),
    ("AVX2", ("avx2", "fma")),
    ("SVE", ("sve",)),
    ("NEON", ("asimd",)),
)
"""Classes of CPUs, the fastest first, by the instructions that they need."""
_QUICK = {name for name, _ in _CLASSES} - {"NEON"}
_LEAST_MEMORY = 1 << 30
_LEAST_SHARED = 64 << 20
"""Docker's default, which tensors of Python models soon fill."""
_LEAST_FILES = 4096
_LEAST_DISK = 2 << 30
_READ_BYTES = 1 << 30
_REPEATS = 3


def memory_speed() -> float:
    """Bytes per second that all usable cores together read: it bounds tokens per second of one request."""
    return statistics.median(read_speeds(_READ_BYTES, usable_cores(), _REPEATS))


def machine_findings(config: Config, speed: float) -> Iterator[Finding]:
    """`speed` is that of `memory_speed`."""
    yield _cpu()
    yield _memory(speed)
    yield _gpus()
    yield _open_files()
    yield _shared_memory()
    yield from _ports(config)
    yield from _folders(config)


def cpu_class() -> str:
    """The name of the newest instructions for matrices that this CPU has, or "none of those that help"."""
    flags = this_cpu().flags
    return next((name for name, needed in _CLASSES if flags.issuperset(needed)), "none of those that help")


def _cpu() -> Finding:
    cpu, cores = this_cpu(), usable_cores()
    kind = cpu_class()
    detail = f"{cpu.name}, {cpu.machine}, {kind}; {cores} cores to compute on"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    figures = {"name": cpu.name, "class": kind, "cores": cores, "threads": threads}
    if cpu.flags and kind not in _QUICK:
        return Finding("CPU", "note", f"{detail}; language models will be slow on it", figures)
    return Finding("CPU", "ok", detail, figures)


def _memory(speed: float) -> Finding:
    total, free = total_memory(), available_memory()
    detail = f"{size_text(free)} of {size_text(total)} available; read at {speed / 1e9:.1f} GB/s"
    figures = {"total": total, "available": free, "bytes_per_second": round(speed)}
    if free < _LEAST_MEMORY:
        return Finding("memory", "problem", f"{detail}: too little for any language model", figures)
    return Finding("memory", "ok", detail, figures)


def _gpus() -> Finding:
    count = visible_gpus()
    if count:
        return Finding("GPUs", "ok", f"{count} NVIDIA GPUs are visible to this process", {"count": count})
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "no NVIDIA driver is loaded" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} shows none"
    return Finding("GPUs", "note", f"none: {why}; models run on the CPU", {"count": 0})


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    figures = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return Finding("open files", "ok", f"up to {soft}", figures)
    return Finding(
        "open files",
        "note",
        f"up to {soft}, one for each connection; the server raises it to {hard} where it may (ulimit -n)",
        figures,
    )


def _shared_memory() -> Finding:
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "note", f"cannot be used ({error.strerror}): Python models need it")
    figures = {"total": room.total, "free": room.free}
    if room.total <= _LEAST_SHARED:
        detail = f"{size_text(room.total)}: too small for Python models with larger tensors (docker run --shm-size=1g)"
        return Finding("/dev/shm", "note", detail, figures)
    return Finding("/dev/shm", "ok", f"{size_text(room.free)} of {size_text(room.total)} free", figures)


def _ports(config: Config) -> Iterator[Finding]:
    server = config.server
    for kind, is_open, number, address in (
        ("HTTP", server.allow_http, server.http_port, server.address("http")),
        ("gRPC", server.allow_grpc, server.grpc_port, server.address("grpc")),
        ("metrics", server.allow_metrics, server.metrics_port, server.address("metrics")),
    ):
        if is_open:
            yield _port(kind, address, number)


def _port(kind: str, address: str, number: int) -> Finding:
    subject, figures = f"port {number}", {"address": address, "port": number}
    try:
        family, _, _, _, place = socket.getaddrinfo(address, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        why = error.strerror or str(error)
        flag = f"--{kind.lower()}-port"
        return Finding(subject, "problem", f"{kind} cannot listen on {address}: {why}; {flag} chooses another", figures)
    return Finding(subject, "ok", f"free for {kind} on {address}", figures)


def _folders(config: Config) -> Iterator[Finding]:
    yield _folder("cache", user_cache("weights").parent, "XDG_CACHE_HOME names another place")
    if config.server.crash_folder is not None:
        yield _folder("crash reports", config.server.crash_folder, "--crash-dir names another place")
    for repository in config.repository.model_repository:
        if "://" not in str(repository):
            yield _readable_folder("repository", Path(repository))


def _folder(subject: str, folder: Path, way_out: str) -> Finding:
    """Whether files can be made there: the folder itself may not be there yet."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    figures: dict[str, object] = {"folder": str(folder)}
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Finding(subject, "note", f"{folder} cannot be written: starts take longer; {way_out}", figures)
    with suppress(OSError):
        free = shutil.disk_usage(place).free
        figures["free"] = free
        if free < _LEAST_DISK:
            return Finding(subject, "note", f"{folder}: only {size_text(free)} free; {way_out}", figures)
        return Finding(subject, "ok", f"{folder}: {size_text(free)} free", figures)
    return Finding(subject, "ok", str(folder), figures)


def _readable_folder(subject: str, folder: Path) -> Finding:
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        return Finding(subject, "ok", f"{folder}; `penstock check {folder}` says which of its models would load")
    return Finding(subject, "problem", f"{folder} is not a folder that this user can read")
