"""Running the steps of a request: each as soon as its inputs are there, and the responses of decoupled ones in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.classic.ensemble.plan import Flow, Selection, Step
from penstock.classic.ensemble.request import EnsembleRequest, Value, Values
from penstock.classic.ensemble.wiring import Stage

IsLast = Callable[[], bool]
"""Whether no other results will follow, as far as is known now: a step may end long after its last response."""
Emit = Callable[[Values, IsLast], Awaitable[None]]
"""Takes the results of the last stage."""
Infer = Callable[[Step, Values], Awaitable[Values]]
"""The outputs of a step that gives one response."""


async def run_steps(selection: Selection, inputs: Values, infer: Infer) -> Values:
    """The results of a selection. Steps in a row need no task of their own.

    Raises what `infer` raises first; the steps that still run are cancelled and have ended then.
    """
    flow = Flow[Value](selection)
    ready = flow.put(inputs)
    try:
        async with asyncio.TaskGroup() as group:
            for step in ready[1:]:
                group.create_task(_follow(step, flow, infer, group))
            if ready:
                await _follow(ready[0], flow, infer, group)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    return flow.tensors


async def _follow(step: Step, flow: Flow[Value], infer: Infer, group: asyncio.TaskGroup) -> None:
    """A step and what it makes ready; the others of that in tasks of their own."""
    following: list[Step] = [step]
    while following:
        step, *others = following
        for other in others:
            group.create_task(_follow(other, flow, infer, group))
        following = flow.put(await infer(step, flow.take(step)))


async def run_stages(request: EnsembleRequest, stages: Sequence[Stage], inputs: Values, width: int, emit: Emit) -> None:
    """Emits the results for each response of the last decoupled step, in the order of the responses that they are made
    of. At most `width` responses of a step are on their way at the same time; it is read no further until then.

    Raises what a step raises first; the steps that still run are cancelled and have ended then.
    """
    await _Stages(request, stages, width).run(0, inputs, lambda: True, emit)


class _Stages:
    def __init__(self, request: EnsembleRequest, stages: Sequence[Stage], width: int) -> None:
        self._request = request
        self._stages = stages
        self._width = width

    async def run(self, number: int, inputs: Values, is_last: IsLast, emit: Emit) -> None:
        """`is_last`: of what this stage is run for."""
        stage = self._stages[number]
        values = await run_steps(stage.selection, inputs, self._request.infer) if stage.selection.steps else inputs
        if stage.stream is None:
            await emit(values, is_last)
        elif self._stages[number + 1] is self._stages[-1] and not self._stages[-1].selection.steps:
            await self._request.stream(
                stage.stream, values, lambda outputs, final: emit(outputs, lambda: final and is_last())
            )
        else:
            await self._fan_out(number, stage.stream, values, is_last, emit)

    async def _fan_out(self, number: int, step: Step, values: Values, is_last: IsLast, emit: Emit) -> None:
        """Each response goes through the next stage in a task of its own, and emits when those before it have ended. As
        in Triton, the last one is known as such if the step has ended when it emits."""
        slots = asyncio.Semaphore(self._width)
        newest: asyncio.Event | None = None
        over = False

        async def one(outputs: Values, before: asyncio.Event | None, ended: asyncio.Event) -> None:
            async def in_turn(results: Values, is_last: IsLast) -> None:
                if before is not None:
                    await before.wait()
                await emit(results, is_last)

            await self.run(number + 1, outputs, lambda: over and newest is ended and is_last(), in_turn)
            if before is not None:
                await before.wait()
            ended.set()
            slots.release()

        async def take(outputs: Values, final: bool) -> None:
            nonlocal newest, over
            await slots.acquire()
            before, newest, over = newest, asyncio.Event(), final
            group.create_task(one(outputs, before, newest))

        try:
            async with asyncio.TaskGroup() as group:
                await self._request.stream(step, values, take)
                over = True
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None


def first_of(errors: BaseExceptionGroup) -> BaseException:
    """The error that ended a group of tasks; what it brought about in others came later."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
