"""What a batcher holds for us, and whether one more request fits."""

from __future__ import annotations

from penstock.engines.scheduler.request import Request


class BatcherSeats:
    """Requests that were handed over. A seat stays taken until the batcher says that its request is gone.

    A batcher gives a prompt its blocks some time after it was handed over, and an engine that runs by itself says so
    later still. So the blocks of a prompt count as promised until its first token proves that it has them.
    """

    def __init__(self, count: int, num_blocks: int, block_size: int) -> None:
        self.count = count
        self.running: dict[int, Request] = {}
        self.aborted: set[int] = set()
        """Ended for their clients, but not yet released by the batcher."""
        self.promised: dict[int, int] = {}
        """Id -> blocks of a prompt without a first token, aborted ones included: they may be in the middle of it."""
        self.num_promised_blocks = 0
        self._block_size = block_size
        self._watermark = max(1, num_blocks // 100)
        """Blocks that stay free, so that running requests can grow."""
        self._contended = False

    @property
    def num_taken(self) -> int:
        return len(self.running) + len(self.aborted)

    @property
    def num_free(self) -> int:
        return self.count - self.num_taken

    def fits(self, request: Request, num_free_blocks: int) -> bool:
        """`num_free_blocks` as the batcher says. Alone with the engine a request always fits."""
        if not self.num_taken:
            return True
        if self._contended or not self.num_free:
            return False
        return num_free_blocks - self.num_promised_blocks - self._blocks_of(request) >= self._watermark

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self._block_size)

    def take(self, request: Request) -> None:
        self.running[request.id] = request
        blocks = self.promised[request.id] = self._blocks_of(request)
        self.num_promised_blocks += blocks

    def has_blocks(self, request_id: int) -> None:
        """Its prompt is computed."""
        self.num_promised_blocks -= self.promised.pop(request_id, 0)

    def preempted(self) -> None:
        """Running requests ran out of blocks. Until one of them ends, what is free belongs to those that had to go."""
        self._contended = True

    def abort(self, request_id: int) -> None:
        del self.running[request_id]
        self.aborted.add(request_id)

    def leave(self, request_id: int) -> None:
        """A request has ended by itself, or an aborted one is gone. Unknown ids are ignored."""
        if self.running.pop(request_id, None) is None and request_id not in self.aborted:
            return
        self.aborted.discard(request_id)
        self.has_blocks(request_id)
        self._contended = False
