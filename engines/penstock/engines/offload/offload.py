"""Blocks on their way between the KV cache and files, which two threads read and write."""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.block_reader import BlockReader, BlocksRead
from penstock.engines.contract.engine_stats import EngineStats, TierStats
from penstock.engines.contract.messages import CallReply
from penstock.engines.contract.runner import BlockHost, ModelRunner
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.inbox import Inbox
from penstock.engines.offload import CLOSING_SECONDS, READING_BYTES, WRITING_BYTES
from penstock.engines.offload.block_file import RECORD_BYTES, BlockFile, Contents
from penstock.engines.offload.folder import ModelFolder
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.kvcache import BlockHash, BlockHasher, BlockSave, BlockTier, KVCacheManager, cache_manager

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
"""Between two tries to get a folder that another process has: the one that this process replaces, for example."""
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0
"""Seconds without the files after they have failed. Each pause is twice as long as the one before, until they have
worked for the longest one."""
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
    """Of a file that has been opened, or looked at again after a pause."""
    opening: bool = False
    """It was to be opened, or looked at again."""
    may_read: bool = False
    """The reading thread has nothing to do any more."""


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
        """What the files hold that are being opened, or looked at again, counts no more."""
        self._again_at: float | None = None
        """When the files are looked at again that have failed."""
        self._next_pause = _FIRST_PAUSE
        self._working_since = math.inf
        self._is_to_clear = False
        """The prefix cache was emptied, and the files were not open, or failed."""
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
            self._pause(str(error))
            return
        if kept is not None:
            self._opened(kept)
        else:
            logger.warning("%s is another process's: evicted blocks are not kept until that one ends", path)
            self._writer.submit(self._wait_for_folder)

    under_way = (True,)
    """It always is: other processes and files may have news at any time."""

    @property
    def next_look(self) -> float | None:
        return self._prefetches.next_look

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

    def advance(self) -> Sequence[CallReply]:
        """Takes in what was read and written, gives up what takes too long, and ends pauses."""
        for done in self._inbox.take():
            if isinstance(done, BlocksRead):
                self._take_in(done)
            else:
                self._note(done)
            if done.error is not None:
                reason = str(done.error) or "no memory"
                if isinstance(done, _Done) and done.opening:
                    self._pause(reason)
                else:
                    self._turn_off(reason, reads=isinstance(done, BlocksRead))
        now = self._clock()
        if self._prefetches.give_up(now):
            self._turn_off("reading takes too long", reads=True)
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._was_cleared = False
            # a read may still hang: nobody waits for the files before it has ended
            self._reader.call(lambda: self._inbox.put(_Done(may_read=True)))
        return ()

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
        stats.offload = TierStats(
            blocks=tier.num_kept,
            bytes=tier.num_kept * (self._host.block_bytes + RECORD_BYTES),
            saved=tier.num_saved,
            dropped=tier.num_dropped,
            loaded=self._prefetches.num_loaded,
            damaged=self._num_damaged,
            waits=self._prefetches.num_waits,
            wait_seconds=self._prefetches.wait_seconds,
        )

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
        self._is_to_clear = True
        try:
            if self._file is not None:
                self._clear_if_due(self._file)
        except OSError as error:
            self._inbox.put(_Done(error=error))

    def _clear_if_due(self, file: BlockFile) -> None:
        if self._is_to_clear:
            file.clear()
            self._is_to_clear = False

    def _kept(self, file: BlockFile) -> list[tuple[BlockHash, int]]:
        self._clear_if_due(file)
        return file.kept()

    def _wait_for_folder(self) -> None:
        """Blocks are not taken in meanwhile, so nothing has to be written."""
        while not self._closing.wait(_RETRY_SECONDS):
            if self._look():
                return

    def _look_again(self) -> None:
        """After a pause."""
        if not self._look():
            self._wait_for_folder()

    def _look(self) -> bool:
        """Tells what the files hold, or why they cannot be used. False: another process has them."""
        try:
            kept = self._try_open() if self._file is None else self._kept(self._file)
        except (OSError, MemoryError) as error:
            self._inbox.put(_Done(error=error, opening=True))
            return True
        if kept is not None:
            self._inbox.put(_Done(kept=kept, opening=True))
        return kept is not None

    def _try_open(self) -> list[tuple[BlockHash, int]] | None:
        """What the files hold; None: another process has them. Raises OSError."""
        if not self._folder.acquire():
            return None
        try:
            self._folder.remove_unused()
            path, num_slots = self._folder.path, self._tier.num_slots
            key, block_bytes = self._folder.file_key, self._host.block_bytes
            self._file = BlockFile(path / "blocks", path / "index", num_slots, block_bytes, key)
            return self._kept(self._file)
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
        self._again_at = None
        self._working_since = self._clock()
        self._tier.open(kept)
        logger.info(
            "evicted blocks are kept in %s: room for %d blocks of %d bytes, %d are there",
            self._folder.path,
            self._tier.num_slots,
            self._host.block_bytes,
            self._tier.num_kept,
        )

    def _note(self, done: _Done) -> None:
        if done.may_read:
            self._writer.submit(self._look_again)
        if done.kept is not None and not self._tier.takes_more:
            self._opened(() if self._was_cleared else done.kept)
        for save in done.saves:
            self._tier.written(save.block_hash, save.slot, succeeded=done.error is None)

    def _take_in(self, done: BlocksRead) -> None:
        """What was not found, though nothing failed, is not in its slot."""
        prefetch = done.prefetch
        for block_hash, slot in prefetch.blocks if done.error is None and prefetch.contents is None else ():
            if block_hash not in done.contents:
                self._num_damaged += self._tier.forget(block_hash, slot)
        self._prefetches.ended(prefetch, done.contents, self._clock())

    def _turn_off(self, reason: str, *, reads: bool) -> None:
        """`reads`: nothing is to be read either."""
        if self._tier.takes_more or (reads and self._tier.num_kept):
            self._pause(reason)
        if reads:
            self._tier.clear()

    def _pause(self, reason: str) -> None:
        now = self._clock()
        if now - self._working_since > _LONGEST_PAUSE:
            self._next_pause = _FIRST_PAUSE
        seconds = self._next_pause
        self._next_pause = min(2 * seconds, _LONGEST_PAUSE)
        self._again_at, self._working_since = now + seconds, math.inf
        self._tier.takes_more = False
        logger.warning("evicted blocks are not kept for %.0f s: %s: %s", seconds, self._folder.path, reason)

    def _save_cached(self, deadline: float) -> None:
        """The blocks used last first. One that is there already counts as used, so that no other takes its place."""
        cached = self._kv.cached_blocks()[: self._tier.num_slots]
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


_FLAG = "--kv-offload-dir"


@dataclass(frozen=True)
class OffloadTier:
    """The books of a KV cache with a tier, whose files are not open yet."""

    kv: KVCacheManager
    tier: BlockTier
    host: BlockHost
    folder: ModelFolder

    def begin(self, prefetches: Prefetches, clock: Callable[[], float]) -> Offload:
        """Raises EngineError for a folder that cannot be used."""
        try:
            return Offload(self.host, self.folder, self.kv, self.tier, prefetches, clock)
        except OSError as error:
            raise EngineError(f"{_FLAG}: {error}") from error


def offload_tier(runner: ModelRunner, config: SchedulerConfig) -> OffloadTier:
    """Raises UnsupportedError for a runner whose blocks cannot be read, EngineError for a folder or a size that cannot
    be used."""
    if not isinstance(runner, BlockHost):
        raise UnsupportedError(f"{_FLAG}: this engine's KV cache cannot be read ({runner.info.runner}).")
    slot_bytes = runner.block_bytes + RECORD_BYTES
    num_slots = config.kv_offload_bytes // slot_bytes
    if not num_slots:
        raise EngineError(f"--kv-offload-bytes: one block of this model takes {slot_bytes}")
    try:
        folder = ModelFolder(Path(config.kv_offload_dir), runner.cache_identity())
    except (OSError, ValueError) as error:
        raise EngineError(f"{_FLAG}: {error}") from error
    tier = BlockTier(num_slots, max(1, WRITING_BYTES // slot_bytes), max(1, READING_BYTES // slot_bytes))
    info = runner.info
    kv = cache_manager(
        info.num_blocks,
        info.kv_groups,
        info.states,
        hasher=BlockHasher(folder.hash_key),
        tier=tier,
        parts=runner.row_parts,
    )
    return OffloadTier(kv, tier, runner, folder)
