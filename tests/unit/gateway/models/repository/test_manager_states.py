"""Whatever happens to the repository and in whatever order: requests are answered by versions that were ready when they
came, none fails while its model is up, and in the end nothing is left over."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.classic.messages import InferRequest
from penstock.engines.errors import PenstockError
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from support.repository import CONFIG, FakeLoader, FakeModel, FakeRepository, loaders_of

NAMES = st.sampled_from(["a", "b"])
POLICIES = st.sampled_from(["", "version_policy { all {} }", "version_policy { latest { num_versions: 2 } }"])
MODES = st.sampled_from(["explicit", "poll"])


class InlineExecutor(ThreadPoolExecutor):
    """Works at once, where it is asked: with threads no two runs would be the same."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(InlineExecutor())
        self.folder = tempfile.TemporaryDirectory()
        self.repository = FakeRepository(Path(self.folder.name))
        self.loader = FakeLoader()
        self.changes: set[asyncio.Task[None]] = set()
        self.requests: list[tuple[FakeModel, asyncio.Task[Any]]] = []
        self.up: set[str] = set()
        """Models of which a load succeeded and that nobody has wanted to be unloaded since."""
        self.unloads = Counter[str]()
        self.tags = 0

    @initialize(mode=MODES)
    def start(self, mode: Any) -> None:
        self.mode = mode
        self.put("a", [True], "")
        options = RepositorySettings(control_mode=mode, poll_seconds=1e6, load_threads=2, exit_on_error=False)
        self.manager = ModelRepository(options, loaders_of(self.loader), [self.repository])  # type: ignore[list-item]
        self.loop.run_until_complete(self.manager.start())
        self.up = {"a"} if mode == "poll" else set()

    @rule(name=NAMES, whole=st.lists(st.sampled_from([True] * 5 + [False]), min_size=1, max_size=3), policy=POLICIES)
    def put(self, name: str, whole: list[bool], policy: str) -> None:
        """New files; some versions cannot be loaded."""
        tags = []
        for good in whole:
            self.tags += 1
            tags.append(str(self.tags) if good else f"fail: {self.tags}")
        self.repository.put(name, *tags, config=policy)

    @precondition(lambda self: self.mode == "poll")
    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.repository.stamps.pop(name, None)
        self.up.discard(name)

    @rule()
    def close_the_gate(self) -> None:
        if self.loader.gate is None or self.loader.gate.is_set():
            self.loader.gate = asyncio.Event()

    @rule()
    def open_the_gate(self) -> None:
        if self.loader.gate is not None:
            self.loader.gate.set()

    @precondition(lambda self: self.mode == "explicit")
    @rule(name=NAMES, config=st.sampled_from([None, CONFIG, '{"backend": "nope"}']))
    def load(self, name: str, config: str | None) -> None:
        self.change(self.loading(name, config))

    @precondition(lambda self: self.mode == "explicit")
    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.up.discard(name)
        self.unloads[name] += 1
        self.change(self.manager.unload(name))

    @precondition(lambda self: self.mode == "poll" and not self.changes)
    @rule()
    def poll(self) -> None:
        self.change(self.manager.poll())

    @rule(name=NAMES, version=st.sampled_from(["", "", "1", "2"]), hold=st.booleans())
    def request(self, name: str, version: str, hold: bool) -> None:
        try:
            model = self.manager.model(name, version)
        except PenstockError:
            assert name not in self.up or version, "a model that is up does not answer"
            return
        assert isinstance(model, FakeModel)
        assert model.ready
        assert not model.unloaded
        assert not version or model.version == int(version)
        assert model.version in self.manager.versions(name)
        if hold:
            model.hold = model.hold or asyncio.Event()
        self.requests.append((model, self.loop.create_task(model.infer(InferRequest(inputs={})))))
        self.run(asyncio.sleep(0))

    @rule()
    def answer(self) -> None:
        self.run(self.answered())

    @rule(turns=st.integers(1, 20))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.run(asyncio.sleep(0))

    @rule()
    def finish(self) -> None:
        self.open_the_gate()
        self.run(self.changed())
        for name in self.up:
            assert self.manager.versions(name)
        if self.mode == "poll":
            self.up = {name for name in self.repository.stamps if self.manager.versions(name)}

    @invariant()
    def the_index_agrees_with_what_serves(self) -> None:
        if not hasattr(self, "manager"):
            return
        ready = {(line.name, int(line.version)) for line in self.manager.index(ready=True)}
        assert ready == {(model.name, model.version) for model in self.manager.models()}
        lines = self.manager.index(ready=False)
        assert max(Counter((line.name, line.version) for line in lines).values(), default=1) == 1
        assert all(model.ready for model in self.manager.models())

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.finish()
            self.run(self.answered())
            self.run(self.manager.stop())
            assert self.loader.live == []
            assert self.repository.open_copies == 0
        self.loop.close()
        self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)

    def change(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.changes.add(task)
        task.add_done_callback(self.changes.discard)
        self.run(asyncio.sleep(0))

    async def loading(self, name: str, config: str | None) -> None:
        unloads = self.unloads[name]
        try:
            await self.manager.load(name, config=config)
        except PenstockError:
            return
        if self.unloads[name] == unloads:
            self.up.add(name)

    async def changed(self) -> None:
        async with asyncio.timeout(60):
            while self.changes:
                await asyncio.wait(self.changes)

    async def answered(self) -> None:
        for model, _ in self.requests:
            if model.hold is not None:
                model.hold.set()
        for model, request in self.requests:
            response = await request
            assert response.parameters == {"tag": model.tag, "version": model.version}
        self.requests.clear()
        for model in self.loader.models:
            model.hold = None


TestRepositoryStates = Machine.TestCase
TestRepositoryStates.settings = settings(max_examples=100, stateful_step_count=40)
