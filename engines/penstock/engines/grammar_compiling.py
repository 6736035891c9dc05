"""Grammars of requests: compiled on threads while the engine steps, and kept for the next request with the same one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.engines.contract.messages import AddRequest, CallReply, Grammar, SamplingParams
from penstock.engines.contract.runner import GrammarHost
from penstock.engines.errors import EngineError, OverloadedError, PenstockError, QueueFullError
from penstock.engines.inbox import Inbox
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import Compilation

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_LONGEST = 10.0
"""Seconds, with the time in line. The compiler's own bounds end it far earlier, unless the machine is overloaded or the
vocabulary has to be read first."""
_MAX_PENDING_CHARS = 4 << 20
"""Of all grammars that wait to be compiled, unless it is one alone: some seconds for the threads."""
_MAX_CACHED_CHARS = 4 << 20
"""Of all grammars that are kept. What is compiled takes about twenty times as much, and what matchers learn of it."""
_CHARS_OF_ENTRY = 4096
"""What the smallest grammar counts for."""


class GrammarCompilations:
    """Owned by the engine's loop, which calls `of` for each request and `advance` between steps."""

    def __init__(self, runner: object, intake: QueueIntake, clock: Callable[[], float]) -> None:
        self._host = runner if isinstance(runner, GrammarHost) and intake.info.supports_grammars else None
        self._intake = intake
        self._clock = clock
        self._cache: OrderedDict[Grammar, Compilation] = OrderedDict()
        """The one used last is at the end."""
        self._cached_chars = 0
        self._pending: dict[Grammar, Compilation] = {}
        """The oldest first."""
        self.under_way: set[Compilation] = set()
        """Those that a thread has, or will have: also what was given up meanwhile."""
        self._pending_chars = 0
        self._threads: ThreadPoolExecutor | None = None
        self._inbox: Inbox[tuple[Compilation, Any]] = Inbox()
        """With what the runner has made of it, or an exception."""

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        return (self._inbox.wakeup,)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        return min((one.give_up_at for one in self._pending.values()), default=None)

    def needs_of(self, message: AddRequest) -> Sequence[Compilation]:
        """The compilation that the request waits for, which begins now if there is none; it has an error if too many
        are waited for. Nothing for a request without a grammar."""
        params = message.params
        if self._host is None or not isinstance(params, SamplingParams) or params.grammar is None:
            return ()
        return (self._compilation(self._host, params.grammar),)

    def _compilation(self, host: GrammarHost, grammar: Grammar) -> Compilation:
        known = self._cache.get(grammar)
        if known is not None and known.compiled is not None and host.is_worn_out(known.compiled):
            del self._cache[grammar]
            self._cached_chars -= _size(known)
        elif known is not None:
            self._cache.move_to_end(grammar)
            return known
        pending = self._pending.get(grammar)
        if pending is None:
            now = self._clock()
            pending = Compilation(grammar, now + _LONGEST)
            if self._pending and self._pending_chars + _size(pending) > _MAX_PENDING_CHARS:
                pending.error = self._full(now)
            else:
                self._begin(host, pending)
        return pending

    def _full(self, now: float) -> QueueFullError:
        """The oldest grammar's wait so far is how long callers are told to wait."""
        oldest = next(iter(self._pending.values()))
        waited = now - (oldest.give_up_at - _LONGEST)
        message = f"Too many grammars wait to be compiled: {len(self._pending)}. Try again later."
        return QueueFullError(message, retry_after=max(1.0, waited))

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is compiled, and gives up what takes too long."""
        # first, and also what was given up before: the descriptor is readable until it is taken
        for compilation, result in self._inbox.take():
            self.under_way.discard(compilation)
            if compilation.is_pending:
                self._end(compilation, result)
        now = self._clock() if self._pending else 0.0
        for compilation in [one for one in self._pending.values() if one.give_up_at <= now]:
            self._end(compilation, OverloadedError(f"The grammar was not compiled within {_LONGEST:g} s."))
        return ()

    def close(self) -> None:
        """What is being compiled is given up."""
        self._inbox.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, host: GrammarHost, compilation: Compilation) -> None:
        self._pending[compilation.grammar] = compilation
        self._pending_chars += _size(compilation)
        self.under_way.add(compilation)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammars")
        self._threads.submit(self._work, host, compilation)

    def _work(self, host: GrammarHost, compilation: Compilation) -> None:
        """On one of the threads."""
        result: Any = None
        if compilation.is_pending:
            try:
                result = host.compile_grammar(compilation.grammar)
            except Exception as error:
                result = error
        self._inbox.put((compilation, result))

    def _end(self, compilation: Compilation, result: Any) -> None:
        del self._pending[compilation.grammar]
        self._pending_chars -= _size(compilation)
        if isinstance(result, Exception):
            compilation.error = _as_error(result)
            self._intake.failed(compilation)
        else:
            compilation.compiled = result
        if not isinstance(compilation.error, OverloadedError | EngineError):
            self._keep(compilation)

    def _keep(self, compilation: Compilation) -> None:
        """What does not compile is kept, too: it would not the next time."""
        self._cache[compilation.grammar] = compilation
        self._cached_chars += _size(compilation)
        while self._cached_chars > _MAX_CACHED_CHARS and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_chars -= _size(oldest)


def _size(compilation: Compilation) -> int:
    return _CHARS_OF_ENTRY + len(compilation.grammar.text)


def _as_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.error("a grammar failed to compile", exc_info=error)
    return EngineError("The engine failed to compile the grammar.")
