"""What the runner keeps of each live request, beside what vLLM's workers keep."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.step import NewRequest
from penstock.engines.kit.sampling.state import GREEDY_BELOW
from penstock.engines.kit.sampling.uniform import stream_key, uniform

NULL_BLOCK = 0
"""vLLM leaves it to padding and never writes it: our block b is its block b + 1."""
_NULL_BLOCKS = 1


@dataclass(slots=True)
class LiveRequest:
    name: str
    """Its id in vLLM. A request that comes back after a preemption has a new one."""
    token_ids: list[int]
    """Prompt and output, as far as they are known."""
    num_prompt_tokens: int
    block_ids: list[int]
    """vLLM's numbers."""
    params: SamplingParams
    seed: int
    random_key: int | None
    """Of its sequence of random numbers; None for greedy requests."""
    adapter: str

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def next_seed(self) -> int | None:
        """Of the next token, below 2**32; None where nothing is drawn."""
        if self.random_key is None:
            return None
        return int(uniform(self.random_key, self.num_output_tokens) * 2.0**32)

    @staticmethod
    def create(new: NewRequest, name: str) -> LiveRequest:
        return LiveRequest(
            name=name,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            block_ids=to_vllm_blocks(new.block_ids),
            params=new.params,
            seed=new.seed,
            random_key=stream_key(new.seed) if is_random(new.params) else None,
            adapter=new.adapter,
        )


def to_vllm_blocks(block_ids: list[int]) -> list[int]:
    return [block_id + _NULL_BLOCKS for block_id in block_ids]


def usable_blocks(num_blocks: int) -> int:
    """How many of vLLM's blocks are ours."""
    return num_blocks - _NULL_BLOCKS


def blocks_to_ask_for(num_blocks: int) -> int:
    """How many blocks vLLM must have for `num_blocks` to be ours."""
    return num_blocks + _NULL_BLOCKS


def is_random(params: SamplingParams) -> bool:
    return params.temperature >= GREEDY_BELOW
