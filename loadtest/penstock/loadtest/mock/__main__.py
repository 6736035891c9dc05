"""The reference server as a process of another one's: settings as JSON in its only argument, gone when its standard
input ends."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from penstock.loadtest.mock.main import serve
from penstock.loadtest.mock.options import MockOptions


async def _main(options: MockOptions) -> None:
    stop = asyncio.Event()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    end = asyncio.create_task(reader.read())
    end.add_done_callback(lambda _: stop.set())
    await serve(options, stop)


if __name__ == "__main__":
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=MockOptions)))
