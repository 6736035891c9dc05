"""Replaying a trace."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Call, Session
from penstock.loadtest.options import WorkloadOptions
from penstock.loadtest.workload.contents import TENSORS, Contents
from penstock.loadtest.workload.trace_files import Row, read_trace


class Trace:
    """The sessions of every `parts`-th request of a trace."""

    def __init__(self, options: WorkloadOptions, contents: Contents) -> None:
        self.skipped = 0
        """Requests without prompt or output tokens so far, which is how traces record failures."""
        self._options = options
        self._contents = contents

    def sessions(self, part: int, parts: int) -> Iterator[Session]:
        """At the recorded times, counted from the first request that is sent. Raises LoadTestError for bad rows."""
        begin: float | None = None
        last = 0.0
        for index, row in enumerate(self._rows()):
            if index == self._options.requests:
                return
            if begin is None:
                begin = last = row.seconds
            if row.seconds < last:
                raise LoadTestError(f"trace: {row.place}: earlier than the request before it")
            last = row.seconds
            if index % parts == part:
                at = (row.seconds - begin) / self._options.trace_speed
                yield Session(calls=[self._call(index, row)], at=at)
        if begin is None:
            raise LoadTestError(f"trace: {self._options.trace} has no requests")

    def _rows(self) -> Iterator[Row]:
        for row in read_trace(self._options.trace or "", self._options.trace_format):
            if row.prompt_tokens > 0 and row.output_tokens > 0:
                yield row
            else:
                self.skipped += 1

    def _call(self, index: int, row: Row) -> Call:
        contents, size = self._contents, self._options.trace_block
        blocks = row.blocks
        if len(blocks) > -(-row.prompt_tokens // size):
            raise LoadTestError(
                f"trace: {row.place}: {len(blocks)} hash_ids are too many for {row.prompt_tokens} tokens"
                f" in blocks of {size}: see --trace-block"
            )
        if contents.protocol in TENSORS:
            return Call(index=index, prompt="", output_tokens=0)
        tokens = contents.own_tokens(row.prompt_tokens)
        whole = min(len(blocks), (tokens - 1) // size)
        lead = [contents.block(block, size) for block in blocks[:whole]]
        # the rest is the beginning of one more block, or nobody else's
        if whole < len(blocks):
            rng, number = contents.rng("block", blocks[whole]), None
        else:
            rng, number = contents.rng("session", index), index
        return Call(
            index=index,
            prompt=contents.source.prompt(lead, whole * size, tokens - whole * size, rng, number),
            prompt_tokens=contents.known_tokens(tokens),
            asked_prompt_tokens=contents.asked_tokens(row.prompt_tokens),
            output_tokens=contents.output_tokens(row.output_tokens),
        )
