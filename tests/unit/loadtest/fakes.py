"""Clients that need no server, and sessions for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import perf_counter

from penstock.loadtest.drive import Driver, Load
from penstock.loadtest.messages import Answer, Call, Prompt, Sample, Session


class FakeClient:
    """Answers when `hold` is set (it is, unless told otherwise); what becomes of a call is up to `answer`."""

    def __init__(self, answer: Callable[[Call], Answer] | None = None) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.began = asyncio.Event()
        """Something was sent."""
        self.calls: list[Call] = []
        self.times: list[float] = []
        self.prompts: list[Prompt] = []
        """As they were when they were sent."""
        self.at_once = self.most_at_once = 0
        self._answer = answer or answered

    async def open(self) -> None:
        pass

    async def send(self, call: Call) -> Answer:
        self.times.append(perf_counter())
        self.calls.append(call)
        self.prompts.append(list(call.prompt) if isinstance(call.prompt, list) else call.prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.began.set()
        try:
            await asyncio.sleep(0)
            await self.hold.wait()
            return self._answer(call)
        finally:
            self.at_once -= 1

    async def close(self) -> None:
        pass


def answered(call: Call) -> Answer:
    now = perf_counter()
    return Answer(sent=now, ended=now, arrivals=[now], output_tokens=1, text=f"answer {call.index}")


def call(index: int, prompt: Prompt = "hello", delay: float = 0.0) -> Call:
    return Call(index=index, prompt=prompt, output_tokens=1, prompt_tokens=1, delay=delay)


def singles(number: int, every: float | None = None) -> Iterator[Session]:
    """Sessions of one call; with `every`, at that many seconds from each other."""
    return (Session(calls=[call(n)], at=None if every is None else n * every) for n in range(number))


class Run:
    """A driver on its way."""

    def __init__(self, client: FakeClient, sessions: Iterator[Session], **load: object) -> None:
        self.samples: list[Sample] = []
        self.started = perf_counter()
        self.driver = Driver(client, Load(**load), self.started, self.samples.append)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.driver.run(sessions))

    async def end(self) -> list[Sample]:
        await self.task
        return self.samples
