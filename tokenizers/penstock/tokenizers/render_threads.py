"""Threads for work that must end within a time limit, and that runs template code we do not trust to end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from queue import SimpleQueue

from .errors import ChatTemplateTimeout


class RenderInterrupted(BaseException):
    """Raised inside a job that is out of time. No `except Exception` in library code can hold it up."""


class RenderThreads:
    """Runs jobs in threads of its own and interrupts those that are out of time.

    An exception set from outside is raised between two Python bytecodes. A job inside one long C call is therefore
    left behind until that returns; with `max_stuck` such jobs, new ones are refused.
    """

    def __init__(self, max_idle: int = 4, max_stuck: int = 4) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._max_idle = max_idle
        self._max_stuck = max_stuck
        self._stuck = 0

    def run(self, work: Callable[[], object], time_limit: float) -> None:
        """Returns when `work` has. Its exceptions are raised here; ChatTemplateTimeout after `time_limit` seconds."""
        job = _Job(work)
        worker = self._worker()
        worker.inbox.put(job)
        if not job.done.acquire(timeout=time_limit) and self._interrupt(job, worker):
            raise ChatTemplateTimeout(f"the chat template did not finish within {time_limit:g} seconds")
        with self._lock:
            keep = not job.interrupted and len(self._idle) < self._max_idle
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.inbox.put(None)
        if job.error is not None:
            raise job.error

    def _worker(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._stuck >= self._max_stuck:
                raise ChatTemplateTimeout("earlier chat templates have not ended yet; no other can be rendered")
        return _Worker()

    def _interrupt(self, job: _Job, worker: _Worker) -> bool:
        """False when the job has ended by itself meanwhile."""
        for _ in range(5):
            # More than once: an exception that reaches a finalizer is swallowed there.
            if not job.interrupt(worker.thread_id):
                return False
            if job.done.acquire(timeout=0.2):
                return True
        with self._lock:
            self._stuck += 1
        if job.leave_behind(self._unstick):
            return True
        self._unstick()
        return True

    def _unstick(self) -> None:
        with self._lock:
            self._stuck -= 1


class _Worker:
    """One thread. It ends after an interrupted job: nobody can tell when a second exception would arrive."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(target=self._work, name="chat-template", daemon=True)
        thread.start()
        self.thread_id: int = thread.ident or 0

    def _work(self) -> None:
        while (job := self.inbox.get()) is not None:
            try:
                job.run()
                job.settle()
            except RenderInterrupted:
                pass  # it may come as late as in `settle`; after that none is on its way
            job.end()
            if job.interrupted:
                return


class _Job:
    """`work`, and how it went."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.error: Exception | None = None
        self.interrupted = False
        self.done = threading.Lock()
        """Released once the job has ended. A bare lock is the fastest thing to wait on."""
        self.done.acquire()
        self._lock = threading.Lock()
        self._started = False
        self._finished = False
        self._on_end: Callable[[], None] | None = None

    def run(self) -> None:
        """In the worker's thread. Exceptions are sent to it only between `_started` and `_finished`."""
        try:
            with self._lock:
                self._started = not self.interrupted
            if self._started:
                self.work()
        except Exception as error:
            self.error = error
        finally:
            with self._lock:
                self._finished = True

    def settle(self) -> None:
        """In the worker's thread, after `run`: takes back an exception that was sent and has not been raised."""
        if self.interrupted:
            _set_async_exception(threading.get_ident(), None)

    def end(self) -> None:
        """In the worker's thread, once no exception can come any more."""
        with self._lock:
            self._finished = True
            on_end, self._on_end = self._on_end, None
            self.done.release()
        if on_end is not None:
            on_end()

    def interrupt(self, thread_id: int) -> bool:
        """Sends RenderInterrupted to the job, or keeps it from starting; False when it has finished."""
        with self._lock:
            if self._finished:
                return False
            self.interrupted = True
            if self._started:
                _set_async_exception(thread_id, RenderInterrupted)
            return True

    def leave_behind(self, on_end: Callable[[], None]) -> bool:
        """`on_end` will be called when the job ends after all; False when it has ended."""
        with self._lock:
            if not self.done.locked():
                return False
            self._on_end = on_end
            return True


def _set_async_exception(thread_id: int, exception: type[BaseException] | None) -> None:
    target = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), target)
