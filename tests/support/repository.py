"""Fakes for tests of the model repository: repositories that change, loaders that wait and fail on command."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.classic.base import InferModel, ModelContext, SaysReady
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, ModelNotFoundError, NotReadyError
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import LocalModel


class FakeModel(SaysReady):
    """Answers with its `tag`: the file that it was loaded from. `hold` keeps requests running until it is set."""

    def __init__(self, name: str, version: int, tag: str, config: ModelConfig | None = None) -> None:
        self.name = name
        self.version = version
        self.tag = tag
        self.config = config or ModelConfig(name=name)
        self.ready = True
        self.statistics = ModelStatistics()
        self.hold: asyncio.Event | None = None
        self.requests: list[InferRequest] = []
        self.outputs: list[Tensor] = []
        self.fail: Exception | None = None
        self.unloaded = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    takes_infer = True
    says_ready = True

    @property
    def signature(self) -> ModelSignature:
        return ModelSignature(self.config)

    async def infer(self, request: InferRequest) -> InferResponse:
        if not self.ready:
            raise NotReadyError(f"model '{self.name}' is not ready")
        self.requests.append(request)
        self._running += 1
        self._idle.clear()
        try:
            await (self.hold.wait() if self.hold is not None else asyncio.sleep(0))
            if self.unloaded:
                raise EngineError("unloaded under a running request")
            if self.fail is not None:
                raise self.fail
            return InferResponse(self.outputs, {"tag": self.tag, "version": self.version})
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def stream(self, request: InferRequest) -> _OneResponse:
        return _OneResponse(self.infer(request))

    async def stop(self) -> None:
        self.ready = False
        await self._idle.wait()
        self.unloaded = True


class _OneResponse:
    def __init__(self, response: Any) -> None:
        self._response = response

    def __aiter__(self) -> _OneResponse:
        return self

    async def __anext__(self) -> InferResponse:
        if self._response is None:
            raise StopAsyncIteration
        response, self._response = self._response, None
        return await response  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


class FakeLoader:
    """Reads `model.txt` of the version's folder: `fail: <text>` cannot be loaded, anything else is the model's tag."""

    def __init__(self) -> None:
        self.models: list[FakeModel] = []
        self.gate: asyncio.Event | None = None
        """Loads wait for it."""
        self.waiting = 0
        self.most_waiting = 0
        self.broken: dict[tuple[str, int], list[Exception]] = {}
        """Errors of the next loads of a version, one each."""
        self.infer_failures: Exception | None = None

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        config.parameters["completed"].string_value = version_folder.name

    async def load(self, context: ModelContext) -> InferModel:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self.waiting -= 1
        if errors := self.broken.get((context.name, context.version)):
            raise errors.pop(0)
        tag = (context.version_folder / "model.txt").read_text()
        if tag.startswith("fail: "):
            raise ValueError(tag.removeprefix("fail: "))
        model = FakeModel(context.name, context.version, tag, context.config)
        model.fail = self.infer_failures
        self.models.append(model)
        return model

    @property
    def live(self) -> list[FakeModel]:
        return [model for model in self.models if not model.unloaded]


class FakeRepository:
    """A repository in a local folder whose fingerprints are counted, not measured."""

    def __init__(self, folder: Path, url: str = "memory") -> None:
        self.url = url
        self.folder = folder
        self.stamps: dict[str, int] = {}
        self.open_copies = 0
        self.fail: EngineError | None = None
        self._changes = 0

    def put(self, name: str, *tags: str, config: str = "", **versions: str) -> None:
        """Writes a model whose versions 1, 2, ... have these tags; `v3="tag"` names versions."""
        numbered = dict(enumerate(tags, 1))
        numbered |= {int(key.removeprefix("v")): tag for key, tag in versions.items()}
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        for number, tag in numbered.items():
            (folder / str(number)).mkdir(parents=True)
            (folder / str(number) / "model.txt").write_text(tag)
        folder.mkdir(exist_ok=True)
        (folder / "config.pbtxt").write_text(f'backend: "fake"\n{config}')
        self._changes += 1
        self.stamps[name] = self._changes

    def remove(self, name: str) -> None:
        del self.stamps[name]

    def model_names(self) -> list[str]:
        if self.fail is not None:
            raise self.fail
        return sorted(self.stamps)

    def fingerprint(self, name: str) -> str:
        if name not in self.stamps:
            raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
        return str(self.stamps[name])

    def local_folder(self, name: str) -> Path | None:
        return self.folder / name

    def fetch(self, name: str) -> LocalModel:
        self.fingerprint(name)
        copy = self.folder / f".copy-{name}-{self._changes}-{self.open_copies}"
        while copy.exists():
            copy = copy.with_name(copy.name + "x")
        shutil.copytree(self.folder / name, copy)
        self.open_copies += 1

        def remove() -> None:
            self.open_copies -= 1
            shutil.rmtree(copy)

        return LocalModel(copy, remove)


def loaders_of(loader: FakeLoader) -> Callable[[str], Any]:
    def find(backend: str, folder: Path | None = None) -> Any:
        if backend != "fake":
            raise ValueError(f"no backend is called '{backend}'")
        return loader

    return find


@asynccontextmanager
async def serving(
    *repositories: FakeRepository, loader: FakeLoader, start: bool = True, **settings: Any
) -> AsyncIterator[ModelRepository]:
    """A started ModelRepository. When it has been stopped, nothing of it may be left."""
    settings.setdefault("control_mode", "explicit")
    manager = ModelRepository(RepositorySettings(**settings), loaders_of(loader), repositories)  # type: ignore[arg-type]
    try:
        if start:
            await manager.start()
        yield manager
    finally:
        await manager.stop()
    assert [model.tag for model in loader.live] == []
    assert [repository.open_copies for repository in repositories] == [0] * len(repositories)


async def ask(manager: ModelRepository, name: str, version: str = "") -> str:
    """The tag of the model that answers."""
    response = await manager.model(name, version).infer(InferRequest(inputs={}))
    return str(response.parameters["tag"])


def states(manager: ModelRepository, *, ready: bool = False) -> list[str]:
    """The index, a line of text for each entry."""
    return [
        " ".join(part for part in (line.name, line.version, line.state or "", line.reason) if part)
        for line in manager.index(ready=ready)
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop go on until it holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


CONFIG = '{"backend": "fake"}'
"""A configuration for load requests."""

FILES: Mapping[str, bytes] = {"1/model.txt": b"uploaded"}
