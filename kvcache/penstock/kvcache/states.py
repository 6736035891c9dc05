"""Rows of recurrent states, and which of them are kept as checkpoints.

A recurrent layer keeps a state of fixed size in place of keys and values of every token, and it cannot be computed
again in place: the token behind it has changed it. So a request has one more table, of rows (`StateTable`). The row of
a block gets the state behind the block's tokens as far as they are computed, and blocks that follow each other have the
same row up to a checkpoint. That is a row which is never written again: the next token reads it and writes another one.
What has to go back (a prefix hit, a fork, steps that are lost) goes back to a checkpoint, and computes the tokens
behind it again.

A row is as large as many tokens' keys and values, so checkpoints are few:
- one at each multiple of an interval, for prompts that begin alike
- one near a prompt's end, where the next turn of a chat goes on. Its last tokens are left out: a template has put them
  there for the answer, and often puts others in their place once it is there.
- one that moves on with the tokens that are generated, from block to block, and stays where they end.
The last two only if they save enough tokens, and while many rows are free.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.kvcache.hashing import HashChain
from penstock.kvcache.integrity import require
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.table import NO_BLOCK, KVGroup, StateTable

_KEPT_ROWS = 2
"""Of a request between two steps: its last checkpoint, and the row in use."""
_REWRITTEN = 8
"""Tokens at a prompt's end that are not counted on. `<think>`, a newline, `</think>` and a newline are four."""
_LEAST_SAVED = 8
"""A checkpoint beside the regular ones saves at least such a part of an interval."""
_LEAST_FREE = 4
"""Part of the rows that such checkpoints leave free: requests that run need them more."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """All recurrent layers of a model: one row number holds for the tables of all of them."""

    interval: int
    """Tokens between two checkpoints of a prompt, not counting those near its end."""
    num_rows: int
    """Of a pool of their own."""
    block_size: int
    """Tokens of an entry in a table of rows: a multiple of those of each group of attention layers."""

    def __post_init__(self) -> None:
        if min(self.interval, self.num_rows, self.block_size) < 1 or self.interval % self.block_size:
            raise ValueError(f"no such group of recurrent layers: {self}")

    @property
    def table(self) -> KVGroup:
        """The shape of a request's table of rows."""
        return KVGroup(self.block_size)

    def largest_chunk(self, chunk: int, steps_in_flight: int) -> int:
        """Most tokens of one request in a step, up to `chunk`: all steps under way have rows at the same time. Raises
        ValueError where there are too few rows for a single request."""
        rows = (self.num_rows - _KEPT_ROWS) // steps_in_flight - 1  # a step may begin and end within an interval
        if rows < 1:
            raise ValueError(f"{self.num_rows} rows of states are too few for {steps_in_flight} steps in flight")
        return min(chunk, rows * self.interval)


class StateRows:
    """The rows of all requests: which runs of blocks get one, and which rows the prefix cache keeps."""

    def __init__(self, states: StateGroup, *, only_regular: bool) -> None:
        """`only_regular`: there are no checkpoints but those at multiples of the interval."""
        self.pool = BlockPool(states.num_rows)
        self.block_size = states.block_size
        self._step = states.interval // states.block_size
        """Blocks of an interval."""
        self._least_saved = sys.maxsize if only_regular else max(1, self._step // _LEAST_SAVED)
        self._least_free = states.num_rows // _LEAST_FREE

    # -- which blocks are behind a checkpoint ----------------------------------------------------------------

    def prompt_end(self, num_tokens: int, start: int) -> int:
        """Where a prompt gets the checkpoint near its end, in blocks, if it is computed from block `start` on; 0: it
        gets none."""
        end = (num_tokens - _REWRITTEN) // self.block_size
        return end if end - max(self.regular_before(end), start) >= self._least_saved else 0

    def regular_before(self, block: int) -> int:
        """The last multiple of the interval up to there."""
        return block // self._step * self._step

    def _end_of_run(self, table: StateTable, begin: int) -> int:
        """Of the run that begins there."""
        regular = self.regular_before(begin) + self._step
        if begin < table.prompt_end:
            return min(regular, table.prompt_end)
        last = max(self.regular_before(begin), table.prompt_end, table.start)
        return min(regular, max(begin + 1, table.prompt, last + self._least_saved))

    def _is_closed(self, table: StateTable, run: int) -> bool:
        """Nobody writes its row any more, once it is computed: what follows has another row, or will have."""
        end = table.ends[run]
        return run + 1 < len(table.ends) or end % self._step == 0 or end == table.start

    def _stays(self, table: StateTable, end: int) -> bool:
        """A checkpoint there is kept when the request goes on."""
        return end % self._step == 0 or end in (table.prompt_end, table.start)

    # -- rows come and go ------------------------------------------------------------------------------------

    def grow(self, table: StateTable, num_tokens: int, beside: int = 0) -> list[int] | None:
        """Gives rows to all blocks of the first `num_tokens`. Returns the new blocks' rows, one for each; None, and
        nothing changes: rows are short. `beside`: rows that stay free."""
        needed, free = -(-num_tokens // self.block_size), self.pool.num_free - beside
        if needed <= table.length:
            return []
        ends = self._ends(table, needed)
        if len(ends) > 1 and len(ends) - 1 > free - self._least_free:
            ends = self._regular_ends(table, needed)
            if len(ends) - 1 > free:
                return None
        table.ends[-1:] = ends if table.ends else ends[1:]
        table.rows += self.pool.allocate(len(ends) - 1)
        before, table.length = table.length, needed
        return table.block_ids[before:]

    def have_room(self, table: StateTable, num_tokens: int) -> bool:
        """Whether `grow` would give rows."""
        return len(self._regular_ends(table, -(-num_tokens // self.block_size))) - 1 <= self.pool.num_free

    def _ends(self, table: StateTable, needed: int) -> list[int]:
        """Of the last run and those behind it, until one has block `needed` - 1."""
        ends = table.ends[-1:] or [0]
        while ends[-1] < needed:
            ends.append(self._end_of_run(table, ends[-1]))
        return ends

    def _regular_ends(self, table: StateTable, needed: int) -> list[int]:
        """The same without a checkpoint that could be left out."""
        end = table.ends[-1] if table.ends else 0
        if table.ends and not self._is_closed(table, len(table.ends) - 1):
            end = -(-end // self._step) * self._step
        ends = [end]
        while ends[-1] < needed:
            ends.append(self.regular_before(ends[-1]) + self._step)
        return ends

    def checkpoint_before(self, table: StateTable, num_computed: int) -> int:
        """The last one up to so many blocks, which are computed; 0: there is none."""
        ends = (end for run, end in enumerate(table.ends) if end <= num_computed and self._is_closed(table, run))
        return max(ends, default=0)

    def publish(self, table: StateTable, token_ids: Sequence[int], num_computed: int) -> list[BlockHash]:
        """Offers checkpoints up to so many blocks, whose steps succeeded, to the prefix cache. Returns their hashes."""
        table.num_computed = num_computed
        table.chain.extend(token_ids, num_computed)
        new = []
        for run, (row, end) in enumerate(zip(table.rows, table.ends, strict=True)):
            if table.num_published < end <= num_computed and self._is_closed(table, run) and self._stays(table, end):
                new.append(self._publish(table, row, end))
        return new

    def _publish(self, table: StateTable, row: int, end: int) -> BlockHash:
        block_hash = table.chain.hashes[end - 1]
        self.pool.publish(row, block_hash)
        table.num_published = end
        return block_hash

    def next_publish(self, table: StateTable) -> int:
        """`publish` has something to do once so many tokens are computed."""
        ends = (end for end in table.ends if end > table.num_published and self._stays(table, end))
        return min(ends, default=sys.maxsize // self.block_size) * self.block_size

    def trim(self, table: StateTable, num_computed: int) -> None:
        """Gives back what is before the last checkpoint of so many blocks."""
        while len(table.ends) > 1 and table.ends[1] <= num_computed and self._is_closed(table, 1):
            self.pool.release([table.rows.pop(0)])
            del table.ends[0]
            table.first = table.ends[0] - 1

    def next_trim(self, table: StateTable) -> int:
        """`trim` has something to do once so many tokens are computed."""
        return table.ends[1] * self.block_size if len(table.ends) > 1 else sys.maxsize

    def fork(self, parent: StateTable, start: int, chain: HashChain) -> StateTable:
        """A table of a sequence that goes on from a checkpoint of the parent's, behind `start` blocks."""
        child = StateTable(parent.index, chain, parent.prompt)
        child.num_computed = min(parent.num_computed, start)
        child.num_published = min(parent.num_published, start)
        if start:
            self._begin_behind(child, start, parent.rows[parent.ends.index(start)])
            self.pool.retain(child.rows)
        return child

    def _begin_behind(self, table: StateTable, start: int, row: int) -> None:
        table.rows, table.ends = [row], [start]
        table.start = table.length = start
        table.first = start - 1

    def admit(self, table: StateTable, start: int, end: int) -> bool:
        """Puts the checkpoint behind `start` tokens into a new table, and rows for those up to `end`. A checkpoint that
        the pool does not have gets a row, and is published like a computed one. False: rows are short."""
        row = None
        if start:
            count = start // self.block_size
            row = self.pool.lookup(table.chain.hashes[count - 1])
            if row is not None:
                self.pool.retain([row])
                table.num_computed = table.num_published = count
            self._begin_behind(table, count, NO_BLOCK if row is None else row)
        is_fetched = start > 0 and row is None
        if self.grow(table, end, beside=int(is_fetched)) is None:
            self.pool.release([] if row is None else [row])
            return False
        if is_fetched:
            table.rows[:1] = self.pool.allocate(1)
        return True

    def release(self, table: StateTable) -> list[BlockHash]:
        """Gives back all rows. The last checkpoint stays in the prefix cache: the sequence may come again, and go on.
        Returns its hash, if it is new there."""
        new: list[BlockHash] = []
        end = self.checkpoint_before(table, table.num_computed)
        if end > table.num_published:
            new.append(self._publish(table, table.rows[table.ends.index(end)], end))
        self.pool.release(table.rows)
        self._pass_over(table)
        table.rows, table.ends = [], []
        return new

    def _pass_over(self, table: StateTable) -> None:
        """The turns of a chat have left a checkpoint each, or two: those before its prompt's are evicted next."""
        if 0 < table.prompt_end <= table.num_published:
            blocks = range(table.prompt_end - 1, 0, -1)
            known = (self.pool.lookup(table.chain.hashes[block - 1]) for block in blocks if block % self._step)
            self.pool.evict_next(islice((row for row in known if row is not None), 2))

    def check_integrity(self, tables: Sequence[StateTable]) -> None:
        """Raises IntegrityError unless these are all tables that hold rows."""
        self.pool.check_integrity()
        held = [row for table in tables for row in table.rows]
        for row in range(self.pool.num_blocks):
            require(self.pool.ref_count(row) == held.count(row), f"row {row}: wrong reference count")
        for table in tables:
            ends = table.ends
            require(len(ends) == len(table.rows) == len(set(table.rows)), "a run without a row of its own")
            require(ends == sorted(set(ends)) and max(ends, default=0) >= table.length, "runs do not follow each other")
            require(all(end < table.length for end in ends[:-1]), "a run has no blocks")
            require(table.first < (ends[0] if ends else 1), "the last checkpoint is missing")
