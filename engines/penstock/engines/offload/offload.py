"""Blocks on their way between the KV cache and files, which two threads read and write."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from penstock.engines.block_reader import BlockReader, BlocksRead
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.runner import BlockHost
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.inbox import Inbox
from penstock.engines.offload import CLOSING_SECONDS
from penstock.engines.offload.block_file import RECORD_BYTES, BlockFile, Contents
from penstock.engines.offload.folder import ModelFolder
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.kvcache import BlockHash, BlockSave, BlockTier, KVCacheManager

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
"""Between two tries to get a folder that another process has: the one that this process replaces, for example."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SAVED_AT_ONCE = 32
_LEAST_SECONDS = 1.0
"""For what is being written at the end, whatever was spent before."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What the writing thread has to say."""

    saves: Sequence[BlockSave] = ()
    """Those that it has written, or tried to."""
    error: OSError | MemoryError | None = None
    kept: Sequence[tuple[BlockHash, int]] | None = None
    """Of a file that has been opened."""


class Offload:
    """Owned by the engine's loop, which calls `carry_out` for each step before it submits it, and `advance` between
    steps. The books are the KV cache manager's: `BlockTier`."""

    def __init__(
        self,
        host: BlockHost,
        folder: ModelFolder,
        kv: KVCacheManager,
        tier: BlockTier,
        prefetches: Prefetches,
        clock: Callable[[], float],
    ) -> None:
        """Takes the folder, now or as soon as another process leaves it. Raises OSError if it cannot be used. On a full
        disk nothing is kept."""
        self._host = host
        self._folder = folder
        self._kv = kv
        self._tier = tier
        self._prefetches = prefetches
        self._clock = clock
        self._num_damaged = 0
        self._was_cleared = False
        """What a folder holds that this process gets later is deleted then."""
        self._file: BlockFile | None = None
        self._writer = ThreadPoolExecutor(1, "kv-offload-write")
        self._inbox: Inbox[BlocksRead | _Done] = Inbox()
        self._reader = BlockReader(host, prefetches, self._inbox.put, "kv-offload-read")
        self._closing = threading.Event()
        self._take_folder()

    def _take_folder(self) -> None:
        path = self._folder.path
        try:
            kept = self._try_open()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            logger.warning("evicted blocks are not kept: %s: %s", path, error)
            return
        if kept is not None:
            self._opened(kept)
        else:
            logger.warning("%s is another process's: evicted blocks are not kept until that one ends", path)
            self._writer.submit(self._wait_for_folder)

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        return (self._inbox.wakeup,)

    def carry_out(self, step: SchedulerOutput) -> None:
        """Copies the blocks out that the step may overwrite, and those in that it reads."""
        if step.block_saves:
            self._writer.submit(self._write, step.block_saves, self._copies(step.block_saves))
        self._reader.carry_out(step)

    def _copies(self, saves: Sequence[BlockSave]) -> Contents:
        try:
            return self._host.read_blocks([save.block_id for save in saves])
        except Exception:
            for save in saves:
                self._tier.written(save.block_hash, save.slot, succeeded=False)
            raise

    def begin(self) -> None:
        """Has the blocks read that requests wait for."""
        self._reader.begin(self._read_slot)

    def advance(self) -> None:
        """Takes in what was read and written, and gives up what takes too long."""
        for done in self._inbox.take():
            if isinstance(done, BlocksRead):
                self._take_in(done)
            else:
                self._note(done)
            if done.error is not None:
                self._turn_off(str(done.error) or "no memory", reads=isinstance(done, BlocksRead))
        if self._prefetches.give_up(self._clock()):
            self._turn_off("reading takes too long", reads=True)

    def collected(self) -> None:
        """What is evicted goes with the next step."""

    def clear(self) -> None:
        """After the tier was cleared: what the files hold is deleted, too."""
        self._prefetches.clear()
        self._was_cleared = True
        self._writer.submit(self._clear)

    def report(self, stats: EngineStats) -> None:
        """Puts the tier's figures there."""
        tier = self._tier
        stats.offload_blocks = tier.num_kept
        stats.offload_bytes = tier.num_kept * (self._host.block_bytes + RECORD_BYTES)
        stats.offload_saved = tier.num_saved
        stats.offload_dropped = tier.num_dropped
        stats.offload_loaded = self._prefetches.num_loaded
        stats.offload_waits = self._prefetches.num_waits
        stats.offload_wait_seconds = self._prefetches.wait_seconds
        stats.offload_damaged = self._num_damaged

    def close(self, *, save: bool) -> None:
        """`save`: writes what is still in the prefix cache, too, as far as the time allows."""
        deadline = self._clock() + CLOSING_SECONDS
        if save and self._file is not None:
            self._save_cached(deadline)
        self._closing.set()
        self._reader.close(wait=False)
        last = self._writer.submit(self._close_file)
        self._writer.shutdown(wait=False)
        wait_for((last,), max(_LEAST_SECONDS, deadline - self._clock()))
        self._inbox.close()

    # -- on the threads --------------------------------------------------------------------------------------

    def _write(self, saves: Sequence[BlockSave], contents: Contents) -> None:
        """`contents`: [saves, block bytes]"""
        error = None
        try:
            if self._file is not None:
                for save, block in zip(saves, contents, strict=True):
                    self._file.write(save.slot, save.block_hash, block)
        except (OSError, MemoryError) as e:
            error = e
        self._inbox.put(_Done(saves=saves, error=error))

    def _read_slot(self, slot: int, block_hash: BlockHash) -> Contents | None:
        file = self._file
        return None if file is None else file.read(slot, block_hash)

    def _clear(self) -> None:
        try:
            if self._file is not None:
                self._file.clear()
        except OSError as error:
            self._inbox.put(_Done(error=error))

    def _wait_for_folder(self) -> None:
        """Blocks are not taken in meanwhile, so nothing has to be written."""
        while not self._closing.wait(_RETRY_SECONDS):
            try:
                kept = self._try_open()
            except OSError as error:
                self._inbox.put(_Done(error=error))
                return
            if kept is not None:
                self._inbox.put(_Done(kept=kept))
                return

    def _try_open(self) -> list[tuple[BlockHash, int]] | None:
        """What the files hold; None: another process has them. Raises OSError."""
        if not self._folder.acquire():
            return None
        try:
            self._folder.remove_unused()
            path, num_slots = self._folder.path, self._tier.num_slots
            key, block_bytes = self._folder.file_key, self._host.block_bytes
            self._file = BlockFile(path / "blocks", path / "index", num_slots, block_bytes, key)
            return self._file.kept()
        except OSError:
            self._release_folder()
            raise

    def _release_folder(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._folder.release()

    def _close_file(self) -> None:
        self._reader.close(wait=True)
        self._release_folder()

    # -- the loop's side of it -------------------------------------------------------------------------------

    def _opened(self, kept: Sequence[tuple[BlockHash, int]]) -> None:
        self._tier.open(kept)
        logger.info(
            "evicted blocks are kept in %s: room for %d blocks of %d bytes, %d are there",
            self._folder.path,
            self._tier.num_slots,
            self._host.block_bytes,
            self._tier.num_kept,
        )

    def _note(self, done: _Done) -> None:
        if done.kept is not None:
            self._opened(() if self._was_cleared else done.kept)
        for save in done.saves:
            self._tier.written(save.block_hash, save.slot, succeeded=done.error is None)

    def _take_in(self, done: BlocksRead) -> None:
        """What was not found, though nothing failed, is not in its slot."""
        prefetch = done.prefetch
        for block_hash, slot in prefetch.wanted if done.error is None and prefetch.contents is None else ():
            if block_hash not in done.contents:
                self._num_damaged += self._tier.forget(block_hash, slot)
        self._prefetches.ended(prefetch, done.contents, self._clock())

    def _turn_off(self, reason: str, *, reads: bool) -> None:
        """`reads`: what is kept is not to be trusted either."""
        if self._tier.takes_more or (reads and self._tier.num_kept):
            logger.warning("evicted blocks are not kept any more: %s: %s", self._folder.path, reason)
        self._tier.takes_more = False
        if reads:
            self._tier.clear()

    def _save_cached(self, deadline: float) -> None:
        """The blocks used last first. One that is there already counts as used, so that no other takes its place."""
        cached = self._kv.pool.cached_blocks()[: self._tier.num_slots]
        saves = []
        self.advance()
        before = self._tier.num_saved
        for number, (block_id, block_hash) in enumerate(cached, 1):
            slot = self._tier.reserve(block_hash)
            if slot is not None:
                saves.append(BlockSave(block_id, slot, block_hash))
            if len(saves) < min(_SAVED_AT_ONCE, self._tier.max_writing) and number < len(cached):
                continue
            if saves:
                written = self._writer.submit(self._write, saves, self._copies(saves))
                wait_for((written,), max(0.0, deadline - self._clock()))
                saves = []
                self.advance()
            if self._clock() >= deadline or not self._tier.takes_more:
                break
        logger.info("%d blocks were written for the next start", self._tier.num_saved - before)
