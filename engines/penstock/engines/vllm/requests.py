"""Live requests as the runner keeps them, beside what vLLM's workers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.contract.messages import PoolingParams, SamplingParams
from penstock.engines.contract.step import NewRequest
from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.kit.sampling.grammar import GrammarState
from penstock.kvcache import NO_BLOCK

NULL_BLOCK = 0
"""vLLM leaves it to padding and to what lies behind windows, and never writes it: our block b is its block b + 1."""
_NULL_BLOCKS = 1


@dataclass(slots=True)
class LiveRequest:
    name: str
    """Its id in vLLM. A request that comes back after a preemption has a new one."""
    token_ids: list[int]
    """Prompt and output, as far as they are known."""
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    """vLLM's numbers, a table for each group."""
    params: SamplingParams
    seed: int
    adapter: str
    grammar: GrammarState | None = None
    num_pending: int = 0
    """Tokens that steps under way are to sample."""
    refusal: PenstockError | None = None
    """Why vLLM was never told of it."""

    @property
    def num_tokens(self) -> int:
        """Those to be sampled by steps under way included."""
        return len(self.token_ids) + self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        """All of them. No step under way samples another one."""
        if self.num_pending:
            raise EngineError("a request is told again while a step under way samples for it")
        return self.token_ids[self.num_prompt_tokens :]


class VLLMRequestTable:
    """The live requests by id, and which of their names vLLM's workers still have to forget."""

    def __init__(self, start_grammar: Callable[[Any, Sequence[int]], GrammarState]) -> None:
        """`start_grammar`: what makes a state of `NewRequest.grammar` and the output so far."""
        self._start_grammar = start_grammar
        self._requests: dict[int, LiveRequest] = {}
        self._finished: set[str] = set()
        self._num_names = 0
        self.tainted: set[int] = set()
        """vLLM's blocks that requests with broken logits have held, and that nobody has cleaned since."""

    def __getitem__(self, request_id: int) -> LiveRequest:
        return self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, new: NewRequest) -> None:
        if isinstance(new.params, PoolingParams):
            raise EngineError("vLLM's executor gives no vectors here")
        self.drop([new.id])
        self._requests[new.id] = LiveRequest(
            name=self._new_name(),
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            block_ids=tuple(to_vllm_blocks(table) for table in new.block_ids),
            params=new.params,
            seed=new.seed,
            adapter=new.adapter,
            grammar=self._grammar_of(new),
        )

    def drop(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._finished.add(request.name)

    def rename(self, request_id: int) -> None:
        """The workers are to forget the request under its old name, and will be told all of it under a new one."""
        request = self._requests[request_id]
        self._finished.add(request.name)
        request.name = self._new_name()

    def taint(self, request: LiveRequest) -> None:
        """Its logits were broken, so its keys and values may be."""
        self.tainted.update(*request.block_ids)
        self.tainted.discard(NULL_BLOCK)

    def take_finished(self) -> set[str]:
        """Names that the workers have to forget, each told once."""
        finished, self._finished = self._finished, set()
        return finished

    def clear(self) -> None:
        self.drop(list(self._requests))

    def _grammar_of(self, new: NewRequest) -> GrammarState | None:
        if new.grammar is None:
            return None
        return self._start_grammar(new.grammar, new.token_ids[new.num_prompt_tokens :])

    def _new_name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"


def to_vllm_blocks(block_ids: Sequence[int]) -> list[int]:
    return [NULL_BLOCK if block_id == NO_BLOCK else block_id + _NULL_BLOCKS for block_id in block_ids]


def usable_blocks(num_blocks: int) -> int:
    """How many of vLLM's blocks are ours."""
    return num_blocks - _NULL_BLOCKS


def blocks_to_ask_for(num_blocks: int) -> int:
    """How many blocks vLLM must have for `num_blocks` to be ours."""
    return num_blocks + _NULL_BLOCKS
