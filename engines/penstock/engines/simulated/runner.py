"""A runner without a model whose every token depends on the whole history, as read back through the block tables.

Each position's slot in the (simulated) KV cache holds a digest of the adapter and all tokens up to it, computed from
the slot of the position before, and the next token is a function of the newest digest. A wrong block table, a missed
copy on write, a stale prefix hit, a slot overwritten by somebody else: all of them change the tokens. So the scheduler
and the cache are tested through it for the one thing that matters, that a request's output does not depend on its
neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import msgspec

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.simulated.adapters import AdapterShelf
from penstock.engines.simulated.faults import Faults

_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes, in seconds. The default takes no time at all."""

    per_step: float = 0.0
    per_prefill_token: float = 0.0
    """For each token beyond one per sequence: prompts and recomputation."""
    per_sequence: float = 0.0

    def step_seconds(self, num_sequences: int, num_tokens: int) -> float:
        return self.per_step + self.per_sequence * num_sequences + self.per_prefill_token * (num_tokens - num_sequences)


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: int = 32_000
    first_token_id: int = 0
    """Generated ids are in [first_token_id, vocab_size): keeps special tokens out."""
    max_model_len: int = 32_768
    block_size: int = 16
    num_blocks: int = 8192
    eos_token_ids: tuple[int, ...] = ()
    latency: LatencyModel = LatencyModel()
    faults: str = ""
    """See `Faults.parse`."""
    max_loras: int = 0
    """0: there are no LoRA adapters."""
    adapters: dict[str, str] = {}
    """Key -> folder of the LoRA adapters that are there from the start."""


@dataclass(slots=True)
class _State:
    token_ids: list[int]
    block_ids: list[int]
    origin: int
    """The digest before the first token: it stands for the adapter."""


class SimulatedRunner(AdapterShelf):
    """Implements ModelRunner and AdapterHost. No distribution to sample from: `info` says so, logprobs are refused."""

    def __init__(self, config: SimulatedConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(config.max_loras, config.adapters)
        self._config = config
        self._sleep = sleep
        self._faults = Faults.parse(config.faults)
        self._slots = [0] * (config.num_blocks * config.block_size)
        self._states: dict[int, _State] = {}
        self._span = config.vocab_size - config.first_token_id
        if self._span < 1:
            raise ValueError("first_token_id must be below vocab_size")
        self.info = ModelInfo(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            eos_token_ids=config.eos_token_ids,
            runner="simulated",
            supports_logprobs=False,
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(step)
        result = ModelRunnerOutput([])
        for request_id, count, start in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            state = self._states[request_id]
            fault = self._faults.of(state.token_ids, start, start + count)
            if fault == "nan":
                result.failed[request_id] = "the model's output is not a number"
            elif fault is not None:
                self._faults.strike(fault)
            result.sampled_token_ids.append([] if fault == "nan" else self._compute(state, start, count))
        seconds = self._config.latency.step_seconds(len(step.request_ids), step.total_num_scheduled_tokens)
        if seconds > 0:
            self._sleep(seconds)
        return result

    def _apply(self, step: SchedulerOutput) -> None:
        states, slots, size = self._states, self._slots, self._config.block_size
        for request_id in step.dropped_ids:
            del states[request_id]
        for new in step.new_requests:
            origin = _SEED ^ crc32(new.adapter.encode("utf-8", "surrogatepass"))
            states[new.id] = _State(list(new.token_ids), list(new.block_ids), origin)
        for request_id, (start, block_ids) in step.new_block_ids.items():
            states[request_id].block_ids[start:] = block_ids
        for source, destination in step.block_copies:
            slots[destination * size : (destination + 1) * size] = slots[source * size : (source + 1) * size]

    def _compute(self, state: _State, start: int, count: int) -> list[int]:
        slots, size, table, tokens = self._slots, self._config.block_size, state.block_ids, state.token_ids
        digest = slots[table[(start - 1) // size] * size + (start - 1) % size] if start else state.origin
        for position in range(start, start + count):
            # one round of a multiplicative hash: enough to make every earlier token matter
            digest = ((digest ^ tokens[position]) * 0xBF58476D1CE4E5B9 + position) & _MASK
            digest ^= digest >> 29
            slots[table[position // size] * size + position % size] = digest
        if start + count < len(tokens):
            return []
        token = self._config.first_token_id + (digest >> 13) % self._span
        tokens.append(token)
        return [token]

    def reset(self) -> None:
        self._states.clear()

    def close(self) -> None:
        self._states.clear()
