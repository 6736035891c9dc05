"""Observation of the server during a run: its metrics, its processes, and this machine's GPUs.

It happens in the command, not in the client processes, about once a second. Whatever fails is left out of the report.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.discover import ask
from penstock.loadtest.clients.settings import client_options
from penstock.loadtest.environment import Usage, busy_cpu_seconds, family, is_local, listeners, usage
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options, Target
from penstock.loadtest.report.model import ServerWatch

GAUGES = (
    "penstock_requests_running",
    "penstock_requests_waiting",
    "penstock_tokens_waiting",
    "penstock_kv_cache_usage_ratio",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:kv_cache_usage_ratio",
    "nv_inference_pending_request_count",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
)
"""How busy servers of different makes say they are: Penstock, vLLM, SGLang, llama.cpp, Triton and its TensorRT-LLM."""
_SHARES = ("_ratio", "_perc", "token_usage", "_utilization")
"""Gauges of which several are not added up."""
_TELLING = ("request_type", "kv_cache_block_type", "kv_cache_type", "general_type")
"""Labels that say which of several gauges of one name it is."""
_NOT_ITS_WORK = ("process_", "python_", "http_", "promhttp_", "go_")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_TYPE = re.compile(r"^# TYPE ([a-zA-Z_:][\w:]*) (\w+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MODEL = ("model", "model_name")


class Page(msgspec.Struct):
    """What it said at one moment."""

    gauges: dict[str, float] = {}
    """The known ones. Of several with one name, those of the model in question; added up, or the highest of shares."""
    counters: dict[str, float] = {}
    """All of the server's, and the sums and counts of its histograms; added up over their labels."""


def is_page(text: str) -> bool:
    return _TYPE.search(text) is not None


def parse(text: str, model: str = "") -> Page:
    """`model`: whose figures are wanted, where the labels tell them apart."""
    kinds = dict(_TYPE.findall(text))
    lines = [
        (name, dict(_LABEL.findall(labels)), value)
        for name, labels, value in _LINE.findall(text)
        if not name.endswith("_bucket")
    ]
    known = {labels[key] for _, labels, _ in lines for key in _MODEL if key in labels}
    page = Page()
    for name, labels, written in lines:
        if model in known and any(labels.get(key, model) != model for key in _MODEL):
            continue
        try:
            value = float(written)
        except ValueError:
            continue
        if value != value or value in (float("inf"), float("-inf")):
            continue
        if name in GAUGES:
            _put(page.gauges, name, labels, value)
        elif _counts(name, kinds) and not name.startswith(_NOT_ITS_WORK):
            page.counters[name] = page.counters.get(name, 0.0) + value
    return page


def _put(gauges: dict[str, float], name: str, labels: dict[str, str], value: float) -> None:
    names = [labels[key] for key in _TELLING if key in labels]
    key = f"{name}.{'.'.join(names)}" if names else name
    if name.endswith(_SHARES):
        gauges[key] = max(gauges.get(key, 0.0), value)
    else:
        gauges[key] = gauges.get(key, 0.0) + value


def _counts(name: str, kinds: dict[str, str]) -> bool:
    if kinds.get(name) == "counter" or kinds.get(name.removesuffix("_total")) == "counter":
        return True
    family = name.removesuffix("_sum").removesuffix("_count")
    return family != name and kinds.get(family) in ("histogram", "summary")


def increases(before: Page, after: Page) -> dict[str, float]:
    """By how much counters have grown, of those that have. One that has fallen began again: then its value is what it
    has grown by."""
    grown = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return {name: round(after.counters[name] if value < 0 else value, 6) for name, value in grown.items() if value}


class Gpus:
    """None where there is no NVML, and where it fails."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except Exception:  # not installed, no driver, no rights: a run goes on without
            self._devices = []

    def read(self) -> dict[str, float]:
        """By name: utilization in percent, used memory in bytes, power in watts."""
        figures: dict[str, float] = {}
        for number, device in enumerate(self._devices):
            try:
                figures[f"gpu{number}_utilization_percent"] = float(
                    self._nvml.nvmlDeviceGetUtilizationRates(device).gpu
                )
                figures[f"gpu{number}_memory_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(device).used)
                figures[f"gpu{number}_power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(device) / 1e3
            except Exception:  # what this one does not tell
                continue
        return figures


_EVERY_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0
_METRICS_PORT = 8002
_ITS_NEIGHBOURS = (8000, 8001)
"""Ports of Penstock and Triton, HTTP and gRPC, beside which metrics are on 8002."""


class Watch:
    """Use as `async with Watch(...) as watch` around a run; then `result` and `other_cores` tell."""

    def __init__(self, options: Options, clients: Collection[int]) -> None:
        """`clients`: the processes that send."""
        self._options = options
        self._clients = clients
        self._local = is_local(options.target.url)
        self._gpus = Gpus() if self._local else None
        self._url = ""
        self._first = self._last = Page()
        self._seconds: list[float] = []
        self._series: dict[str, list[float]] = {}
        self._gpu_series: dict[str, list[float]] = {}
        self._used: dict[int, Usage] = {}
        """By process of the server: the last that was seen of it."""
        self._before: dict[int, Usage] = {}
        self._task: asyncio.Task[None] | None = None
        self._wall = 0.0
        self.clock_ms = 0.0
        """By how much the time of day has moved against time.perf_counter."""

    async def __aenter__(self) -> Self:
        """Raises LoadTestError when there is nothing where the user says that metrics are."""
        for url in _candidates(self._options):
            page = await self._page(url)
            if page is not None:
                self._url, self._first = url, page
                break
        chosen = self._options.load.metrics_url
        if chosen not in (None, "none") and not self._url:
            raise LoadTestError(f"metrics-url: {chosen} is not a Prometheus page (text format)")
        self._listeners = listeners(_port(self._options.target)) if self._local else set()
        self._began, self._time_of_day = time.perf_counter(), time.time()
        self._busy, self._own = busy_cpu_seconds(), time.process_time()
        self._before = self._used = usage(self._server())
        self._task = asyncio.create_task(self._look_regularly())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._wall = time.perf_counter() - self._began
        self.clock_ms = round(1e3 * (time.time() - self._time_of_day - self._wall), 3)
        self._machine = busy_cpu_seconds() - self._busy
        self._own = time.process_time() - self._own
        self._used = self._used | usage(self._server())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        page = await self._page(self._url) if self._url else None
        self._last = self._last if page is None else page

    @property
    def result(self) -> ServerWatch | None:
        """None where nothing could be seen."""
        if not self._url and not self._used and not self._gpu_series:
            return None
        return ServerWatch(
            metrics_url=self._url,
            metrics=self._series,
            counters=increases(self._first, self._last) if self._url else {},
            seconds=self._seconds,
            gpu=self._gpu_series,
            cores=round(self._server_cpu / self._wall, 3) if self._used and self._wall else None,
        )

    def other_cores(self, client_cpu: float) -> float | None:
        """Cores that neither the clients (CPU seconds given), nor the server's processes, nor this one used; a server
        whose processes are not found is among the others. None for a run that took no time."""
        if not self._wall:
            return None
        known = client_cpu + self._own + self._server_cpu
        return round(max(0.0, self._machine - known) / self._wall, 2)

    @property
    def _server_cpu(self) -> float:
        nothing = Usage(0.0, 0.0)
        return sum(now.cpu_seconds - self._before.get(pid, nothing).cpu_seconds for pid, now in self._used.items())

    def _server(self) -> set[int]:
        return family(self._listeners, without=(os.getpid(), *self._clients)) if self._listeners else set()

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS - (time.perf_counter() - self._began) % _EVERY_SECONDS)
            with suppress(Exception):  # nothing that can be seen of a server is worth a run
                await self._look()

    async def _look(self) -> None:
        values: dict[str, float] = {}
        page = await self._page(self._url) if self._url else None
        if page is not None:
            self._last = page
            values |= page.gauges
        now, elapsed = usage(self._server()), time.perf_counter() - self._began
        if now:
            since = elapsed - (self._seconds[-1] if self._seconds else 0.0)
            grown = sum(u.cpu_seconds - self._used[pid].cpu_seconds for pid, u in now.items() if pid in self._used)
            values["process_cpu_cores"] = round(grown / since, 3)
            values["process_rss_bytes"] = sum(used.rss_bytes for used in now.values())
            self._used = self._used | now
        self._seconds.append(round(elapsed, 3))
        _append(self._series, values, len(self._seconds))
        if self._gpus is not None:
            _append(self._gpu_series, self._gpus.read(), len(self._seconds))

    async def _page(self, url: str) -> Page | None:
        parts = urlsplit(url)
        target = self._options.target
        here = urlsplit(target.url).netloc == parts.netloc
        with suppress(LoadTestError, ValueError):
            options = ClientOptions(
                url=f"{parts.scheme}://{parts.netloc}",
                api_key=client_options(target).api_key if here else None,  # a key is not for everybody
                timeout=_TIMEOUT_SECONDS,
                verify_tls=target.verify_tls,
            )
            answer = await ask(options, parts.path + (f"?{parts.query}" if parts.query else ""))
            text = answer.body.decode("utf-8", "replace")
            if answer.status == 200 and is_page(text):
                return parse(text, target.model)
        return None


def _append(series: dict[str, list[float]], values: dict[str, float], length: int) -> None:
    """One value for each series: one that has none keeps its last, one that is new was 0 until now."""
    for name in series | values:
        known = series.setdefault(name, [0.0] * (length - 1))
        known.append(values.get(name, known[-1] if known else 0.0))


def _candidates(options: Options) -> list[str]:
    chosen = options.load.metrics_url
    if chosen is not None:
        return [] if chosen == "none" else [chosen if "//" in chosen else f"http://{chosen}"]
    url = options.target.url
    parts = urlsplit(url if "//" in url else f"http://{url}")
    urls = [f"{parts.scheme}://{parts.netloc}/metrics"]
    if parts.port in _ITS_NEIGHBOURS:
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        urls.append(f"http://{host}:{_METRICS_PORT}/metrics")
    return urls


def _port(target: Target) -> int:
    parts = urlsplit(target.url if "//" in target.url else f"//{target.url}")
    return parts.port or (443 if parts.scheme == "https" else 80)
