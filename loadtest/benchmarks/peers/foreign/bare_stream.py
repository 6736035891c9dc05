"""A server that streams without a product around it: uvicorn with starlette, and chunks that lie ready.

`bare_stream.py PORT plain|events [STEP_MS]`: StreamingResponse, or sse-starlette's EventSourceResponse. An engine in
the same process puts one chunk into the queue of every stream that lives, again and again: each STEP_MS milliseconds,
or as fast as the streams take them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

_ABOUT = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "bare"}
_TOKEN = json.dumps({**_ABOUT, "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]})
_LAST = json.dumps({**_ABOUT, "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]})


class Engine:
    def __init__(self, step_seconds: float) -> None:
        """0: as fast as the streams take the chunks."""
        self._step_seconds = step_seconds
        self._left: dict[asyncio.Queue[str | None], int] = {}
        self._task: asyncio.Task[None] | None = None

    async def chunks(self, tokens: int) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._left[queue] = tokens
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        while (chunk := await queue.get()) is not None:
            yield chunk
        yield _LAST
        usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
        yield json.dumps({**_ABOUT, "choices": [], "usage": usage})
        yield "[DONE]"

    async def _steps(self) -> None:
        while self._left:
            for queue in list(self._left):
                queue.put_nowait(_TOKEN)
                self._left[queue] -= 1
                if not self._left[queue]:
                    queue.put_nowait(None)
                    del self._left[queue]
            await asyncio.sleep(self._step_seconds)
            await asyncio.sleep(0)  # every stream that was woken sends before the next step


def application(style: str, step_seconds: float) -> Starlette:
    engine = Engine(step_seconds)

    async def complete(request: Request) -> Response:
        tokens = (await request.json())["max_tokens"]
        if style == "events":
            return EventSourceResponse(({"data": chunk} async for chunk in engine.chunks(tokens)), sep="\n")
        lines = (f"data: {chunk}\n\n" async for chunk in engine.chunks(tokens))
        return StreamingResponse(lines, media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return PlainTextResponse("ready")

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)])


def main() -> None:
    port, style, step_ms = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0
    uvicorn.run(
        application(style, step_ms / 1e3),
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="error",
        access_log=False,
    )


if __name__ == "__main__":
    main()
