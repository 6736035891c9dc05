"""Trials of number types: what `numerics.resolve` chooses is believed once a tiny graph has shown it.

A graph that fails can leave the plugin in a state in which the next one crashes. So trials run in a child process.
Results are kept on disk for each CPU and version: a trial runs once.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.engines.host.cpu import Cpu, this_cpu
from penstock.engines.host.kernel_files import kernel_text
from penstock.engines.host.user_cache import user_cache
from penstock.engines.openvino.numerics import CpuFacts, Dtype, KVType, ModelFacts, Numerics, Wish, cpu_facts, resolve

logger = logging.getLogger(__name__)

_FORMAT = "3"
"""Of the trials: a change runs all of them again."""
_TIMEOUT = 30.0
"""Seconds for a child: one that hangs shows nothing, on a busy machine."""
_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)}
"""Exit statuses. Other signals come from outside, such as that of a system without memory."""
_THREADED = re.compile(r"openvino_intel_cpu_plugin|lib(?:g|i)?omp[-.\d]")
"""Libraries with threads of their own, once they are used."""

Results = dict[str, str]
"""What went wrong, by the name of a trial; empty: nothing did."""


class Trial(NamedTuple):
    operation: str
    """attention, product or rounding."""
    dtype: Dtype
    kv: KVType | None = None

    @property
    def name(self) -> str:
        return f"{self.operation} {self.dtype}" + (f" {self.kv.name}" if self.kv else "")


def settle(wish: Wish, model: ModelFacts) -> Numerics:
    """The first choice that holds on this machine; one line of the log names it. Raises as `resolve` does, and
    UnsupportedError where nothing holds."""
    memory = _Memory(this_cpu())
    facts, numerics = cpu_facts(this_cpu()), None
    while numerics is None:
        choice = resolve(facts, wish, model)
        memory.learn(_trials(choice))
        facts, numerics = _judged(facts, wish, choice, memory.results)
    logger.info("computing in %s (%s)", numerics.words, numerics.reason)
    return numerics


def predict(wish: Wish, model: ModelFacts) -> Numerics:
    """As `settle`, but only by what is known already: it does not load OpenVINO."""
    results = _Memory(this_cpu()).results
    facts, numerics = cpu_facts(this_cpu()), None
    while numerics is None:
        choice = resolve(facts, wish, model)
        facts, numerics = _judged(facts, wish, choice, results)
    return numerics


def _trials(numerics: Numerics) -> list[Trial]:
    dtypes = [numerics.dtype] + ([numerics.large_steps] if numerics.large_steps else [])
    if numerics.kv is not None:
        trials = [Trial("attention", dtype, numerics.kv) for dtype in dtypes]
    else:
        trials = [Trial("product", dtype) for dtype in dtypes if dtype != "f32"]
    return trials + ([Trial("rounding", numerics.dtype)] if numerics.activations == "int8" else [])


def _judged(facts: CpuFacts, wish: Wish, choice: Numerics, results: Results) -> tuple[CpuFacts, Numerics | None]:
    """The choice, or else what the CPU has after a trial that failed. Raises UnsupportedError where f32 has failed:
    there is nothing else."""
    for trial in _trials(choice):
        fault = results.get(trial.name)
        if not fault:
            continue
        if trial.operation == "rounding":
            return facts.without_rounding(trial.dtype), None
        if trial.dtype != "f32":
            return facts.without(trial.dtype, fault), None
        if wish.kv_cache_dtype != "auto":
            raise UnsupportedError(f"kv_cache_dtype={wish.kv_cache_dtype}: {fault}; use auto", param="kv_cache_dtype")
        raise UnsupportedError(f"OpenVINO does not compute on this machine: {fault}", param="dtype")
    return facts, choice


class _Memory:
    """Results of trials on a CPU, in a file of the user's cache."""

    def __init__(self, cpu: Cpu) -> None:
        versions = (_FORMAT, metadata.version("openvino"))
        identity = repr((versions, cpu.name, cpu.machine, sorted(cpu.flags)))
        self._path = user_cache("trials") / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
        self.results: Results = {}
        with suppress(OSError, msgspec.MsgspecError):
            self.results = msgspec.json.decode(self._path.read_bytes(), type=Results)

    def learn(self, trials: Sequence[Trial]) -> None:
        """Runs those whose results are not known."""
        unknown = [trial for trial in trials if trial.name not in self.results]
        if not unknown:
            return
        learned = run_trials(unknown)
        for name, fault in learned.items():
            logger.debug("trial of %s: %s", name, fault or "it works")
        self.results |= learned
        self._keep()

    def _keep(self) -> None:
        """Where the file cannot be written, the next start runs the trials again."""
        partial = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(self.results))
            partial.replace(self._path)


def run_trials(trials: Sequence[Trial], timeout: float = _TIMEOUT) -> Results:
    """One that crashes its process has failed. Those that are not reached, because the time is over or the system has
    ended the process, have no result."""
    results, status = _run_in(_forked if _is_fresh() else _spawned, trials, timeout)
    if status in _CRASHES and _is_fresh():
        results, status = _run_in(_spawned, trials, timeout)  # forking itself must not be what crashed
    if status in _CRASHES:
        results[trials[len(results)].name] = f"OpenVINO crashed with {signal.Signals(-status).name}"
    elif len(results) < len(trials):
        logger.warning("a trial of %s had no result and is taken to work", trials[len(results)].name)
    return results


def _is_fresh() -> bool:
    """Nothing in this process has computed with OpenVINO or OpenMP: a copy of it can. Elsewhere the copy would lack
    their threads, and could crash."""
    return sys.platform == "linux" and _THREADED.search(kernel_text(Path("/proc/self/maps"))) is None


def _run_in(
    start: Callable[[Sequence[Trial], int], int], trials: Sequence[Trial], timeout: float
) -> tuple[Results, int]:
    """Results, and the exit status of a child: below zero the number of a signal."""
    reading, writing = os.pipe()
    child = start(trials, writing)
    os.close(writing)
    try:
        lines = _lines(reading, len(trials), time.monotonic() + timeout)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has said all, or hangs
        _, status = os.waitpid(child, 0)
    return dict(json.loads(line) for line in lines), os.waitstatus_to_exitcode(status)


def _forked(trials: Sequence[Trial], writing: int) -> int:
    """The child's process id. It takes some 50 ms, as everything is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child touches nothing that they hold
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # its report would be the parent's
            _compute(trials, writing)
        finally:
            os._exit(0)  # neither back into the parent's code nor through its exit handlers
    return child


def _spawned(trials: Sequence[Trial], writing: int) -> int:
    """The process id of a new interpreter, which takes half a second."""
    command = [sys.executable, "-m", __name__, str(writing), msgspec.json.encode(trials).decode()]
    os.set_inheritable(writing, True)
    silent = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=[silent])


def _compute(trials: Sequence[Trial], writing: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for trial in trials:
        os.write(writing, json.dumps([trial.name, _fault(trial)]).encode() + b"\n")


def _lines(reading: int, count: int, end: float) -> list[bytes]:
    """Whole lines, until there are `count`, the other side has closed the pipe, or the time is over."""
    received = b""
    while received.count(b"\n") < count and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        received += piece
    return received.split(b"\n")[:-1]


def _fault(trial: Trial) -> str:
    from penstock.engines.openvino import trial_graphs  # loads OpenVINO

    try:
        if trial.kv is not None:
            return trial_graphs.attention_fault(trial.dtype, trial.kv)
        fault = trial_graphs.product_fault if trial.operation == "product" else trial_graphs.rounding_fault
        return fault(trial.dtype)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"OpenVINO refuses it: {lines[-1][:300] if lines else type(error).__name__}"


if __name__ == "__main__":
    _compute(msgspec.json.decode(sys.argv[2], type=list[Trial]), int(sys.argv[1]))
