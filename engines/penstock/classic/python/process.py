"""A model's process: spawned with a socket and two arenas, its output in the server's log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.python.arena_files import ArenaFiles
from penstock.classic.python.environment import Environment
from penstock.classic.python.options import PythonOptions
from penstock.classic.python.output import OutputLog
from penstock.engines.host.black_box import BlackBox

_WORKER = Path(__file__).parent / "worker" / "__main__.py"


@dataclass
class Launch:
    """What is needed to start a model's process."""

    environment: Environment
    options: PythonOptions
    logger_name: str


@contextlib.contextmanager
def prepared(
    launch: Launch, box: BlackBox
) -> Iterator[tuple[list[str], dict[str, str], socket.socket, ArenaFiles, list[int]]]:
    """Command line, environment, our end of the socket, the arenas' files, and the descriptors to hand over."""
    ours, theirs = socket.socketpair()
    try:
        files = ArenaFiles(launch.options.shm_region_prefix_name)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    try:
        passed = [theirs.fileno(), files.down, files.up, box.descriptor]
        sizes = (launch.options.shm_default_byte_size, launch.options.shm_growth_byte_size)
        command = launch.environment.command(str(_WORKER), *map(str, (*passed, os.getpid(), *sizes)))
        yield command, launch.environment.variables(), ours, files, passed
    except BaseException:
        ours.close()
        files.close()
        raise
    finally:
        theirs.close()


class ModelProcess:
    """A running one, on the event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, files: ArenaFiles, box: BlackBox
    ) -> None:
        self._process = process
        self.box = box
        self.socket = sock
        self.files = files

    @classmethod
    async def spawn(cls, launch: Launch) -> ModelProcess:
        """Raises OSError when there can be no process."""
        box = BlackBox()
        with prepared(launch, box) as (command, variables, ours, files, passed):
            output = OutputLog.open(launch.logger_name)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=output.writer,
                    stderr=output.writer,
                    pass_fds=passed,
                    env=variables,
                    start_new_session=True,
                )
            except BaseException:
                output.close()
                raise
            await output.start()
            return cls(process, ours, files, box)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        """The process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience: float) -> None:
        """Waits for it to end, and kills it after `patience` seconds, or when nobody waits any more; its children are
        killed anyway."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
        finally:
            self.kill()
        await self._process.wait()
