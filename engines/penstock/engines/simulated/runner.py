"""A runner without a model whose every token depends on the whole history, as read back through the block tables.

The next token is a function of the newest position's digest (`digests`), so scheduler and cache are tested through it
for the one thing that matters: that a request's output does not depend on its neighbours, nor on how its tokens were
cut into steps.

The device is a timeline. A step begins when it was submitted or when the one before it ended, whichever is later, and
ends when its time by the latency model is over; `collect` waits for that moment. So work of the host hides behind it
exactly as far as on a real device, without a thread that would have to share the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import PoolingParams, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NumericalError, PenstockError
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured
from penstock.engines.simulated.digests import PagedDigests, RecurrentDigests, mix, origin_of
from penstock.engines.simulated.faults import Faults, strike
from penstock.kvcache import KVGroup, StateGroup


class AdapterShelf:
    """Implements AdapterHost. What an adapter's weights would do to the tokens, its key does."""

    def __init__(self, max_loras: int, adapters: Mapping[str, str]) -> None:
        """`adapters`: key -> folder of those that are there from the start. Raises what `prepare_adapter` raises."""
        self.adapters = AdapterSlots[Path](max_loras)
        load_configured(adapters, self.prepare_adapter, self.install_adapter)

    def prepare_adapter(self, key: str, folder: Path) -> Path:
        self.adapters.check_free(key)
        if not (folder / "adapter_config.json").is_file():
            raise InvalidRequestError("The folder holds no adapter_config.json.")
        return folder

    def install_adapter(self, key: str, prepared: Path) -> None:
        self.adapters.hold(key, prepared)

    def unload_adapter(self, key: str) -> None:
        self.adapters.held.pop(key, None)


_POOLED_SIZE = 16
_GUESS_STATES = 12


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes, in seconds. The default takes no time at all."""

    per_step: float = 0.0
    per_prefill_token: float = 0.0
    """For each token beyond one per sequence: prompts, recomputation, and guesses to verify."""
    per_sequence: float = 0.0

    def step_seconds(self, num_sequences: int, num_tokens: int) -> float:
        return self.per_step + self.per_sequence * num_sequences + self.per_prefill_token * (num_tokens - num_sequences)


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: int = 32_000
    first_token_id: int = 0
    end_token_id: int | None = None
    """Generated ids are in [first_token_id, end_token_id): keeps special tokens out. None: vocab_size."""
    max_model_len: int = 32_768
    block_size: int = 16
    kv_groups: tuple[KVGroup, ...] = ()
    """Groups of layers, in place of a single one with full attention and blocks of `block_size`."""
    states: StateGroup | None = None
    """Of recurrent layers. None: there are none."""
    num_blocks: int = 8192
    eos_token_ids: tuple[int, ...] = ()
    max_steps_in_flight: int = 2
    latency: LatencyModel = LatencyModel()
    faults: str = ""
    """See `Faults.parse`."""
    max_loras: int = 0
    """0: there are no LoRA adapters, and nobody checks the keys of requests."""
    adapters: dict[str, str] = {}
    """Key -> folder of the LoRA adapters that are there from the start."""


@dataclass(slots=True)
class _State:
    """A live request, as of the newest step that was computed."""

    token_ids: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    """One for each group."""
    pooled: bool
    """A vector is wanted."""
    greedy: bool
    seed: int
    origin: int
    failed: PenstockError | None = None
    """Why it gets no more tokens."""


@dataclass(slots=True)
class _Submitted:
    step: SchedulerOutput
    new: dict[int, _State]
    """Those that it introduces, by id."""
    at: float


class SimulatedRunner(AdapterShelf):
    """Implements ModelRunner, AdapterHost and BlockHost. No distribution to sample from: `info` says so, logprobs are
    refused.

    A greedy token depends on the digest alone; with a temperature above 0, on the seed and the token's number, too.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config.max_loras, config.adapters)
        end = config.vocab_size if config.end_token_id is None else config.end_token_id
        self._first, self._span = config.first_token_id, end - config.first_token_id
        if not 0 <= config.first_token_id < end <= config.vocab_size:
            raise ValueError(
                f"no token ids from {config.first_token_id} up to {end} in a vocabulary of {config.vocab_size}"
            )
        if config.max_steps_in_flight < 1:
            raise ValueError(f"max_steps_in_flight must be at least 1, not {config.max_steps_in_flight}")
        self.max_steps_in_flight = config.max_steps_in_flight
        self.busy_seconds = 0.0
        """How long the device has computed since the start."""
        self.info = ModelInfo(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            kv_groups=config.kv_groups or (KVGroup(config.block_size),),
            states=config.states,
            num_blocks=config.num_blocks,
            eos_token_ids=config.eos_token_ids,
            runner="simulated",
            supports_logprobs=False,
            supports_pooling=True,
            supports_drafts=True,
            guess_states=_GUESS_STATES if config.states is not None else 0,
        )
        self._config = config
        self._sleep = sleep
        self._clock = clock
        self._faults = Faults.parse(config.faults)
        self._cache = _cache_of(self.info)
        self._states: dict[int, _State] = {}
        self._under_way: deque[_Submitted] = deque()
        self._free_at = 0.0
        """When the device has done, or will have done, all that was collected."""
        self._closed = threading.Event()

    def submit(self, step: SchedulerOutput) -> None:
        if len(self._under_way) >= self.max_steps_in_flight:
            raise RuntimeError(f"{len(self._under_way)} steps are under way, no more fit")
        # the scheduler's lists grow while the step waits for its turn
        new = {request.id: _state_of(request) for request in step.new_requests}
        self._under_way.append(_Submitted(step, new, self._clock()))

    def collect(self) -> ModelRunnerOutput:
        """Computes now, and returns when the device would have."""
        oldest = self._under_way.popleft()
        step = oldest.step
        self._apply(oldest)
        seconds = self._config.latency.step_seconds(len(step.request_ids), step.total_num_scheduled_tokens)
        if self._faults:
            seconds += self._misbehave(step)
        result = self._compute(step)
        self._free_at = max(oldest.at, self._free_at) + seconds
        self.busy_seconds += seconds
        left = self._free_at - self._clock()
        if left > 0:
            self._sleep(left)
        return result

    def _apply(self, submitted: _Submitted) -> None:
        step = submitted.step
        for request_id in step.dropped_ids:
            del self._states[request_id]
        for request_id, state in submitted.new.items():
            self._states[request_id] = state
        for update in step.block_updates:
            self._states[update.request_id].tables[update.group][update.start :] = update.block_ids
        for request in step.new_requests:
            if self._config.max_loras and request.adapter and request.adapter not in self.adapters.held:
                submitted.new[request.id].failed = ModelNotFoundError("its LoRA adapter is not loaded")

    def _misbehave(self, step: SchedulerOutput) -> float:
        """The faults of this step's prompt tokens, before it changes the cache: the seconds that it takes longer."""
        seconds = 0.0
        for request_id, count, start in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            state = self._states[request_id]
            fault = self._faults.of(state.token_ids, start, min(start + count, state.num_prompt_tokens))
            if fault is None:
                continue
            if fault.kind == "slow":
                seconds += fault.seconds
            elif fault.kind == "nan":
                state.failed = NumericalError("the model's output is not a number")
            elif fault.kind in ("kill", "hang"):
                strike(fault.kind)
            else:
                if fault.kind == "stall":
                    self._closed.wait()
                self._spoil(step)
                raise RuntimeError("a fault was ordered")
        return seconds

    def _spoil(self, step: SchedulerOutput) -> None:
        for request_id, count, start in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            self._cache.spoil(self._states[request_id].tables, start, start + count)

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        states, digest_of = self._states, self._cache.compute
        for source, destination in step.block_copies:
            self._cache.copy(source, destination)
        result = ModelRunnerOutput([])
        for request_id, count, start in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            state = states[request_id]
            tables, tokens, origin = state.tables, state.token_ids, state.origin
            sampled: list[int] = []
            if state.failed:
                self._cache.spoil(tables, start, start + count)
                result.failed[request_id] = state.failed
            elif request_id in step.drafts:
                sampled = self._verify(state, start, step.drafts[request_id])
            else:
                end = start + count
                for position in range(start, end):
                    digest = digest_of(tables, tokens[position], position, origin)
                if end == len(tokens):
                    if state.pooled:
                        result.pooled[request_id] = _vector(digest)
                    else:
                        sampled = [self._sample(state, digest)]
            result.sampled_token_ids.append(sampled)
        return result

    def _verify(self, state: _State, start: int, guesses: list[int]) -> list[int]:
        """Computes the tokens from `start` on and the guesses behind them. Returns what it samples behind the last
        known one, and behind each guess that proves right."""
        known = len(state.token_ids)
        tokens = state.token_ids + guesses
        digests = [
            self._cache.compute(state.tables, tokens[position], position, state.origin)
            for position in range(start, len(tokens))
        ]
        sampled: list[int] = []
        for guess, digest in zip([*guesses, None], digests[known - 1 - start :], strict=True):
            sampled.append(self._sample(state, digest))
            if sampled[-1] != guess:
                break
        last = known - 2 + len(sampled)
        self._cache.go_back(state.tables, last, digests[last - start])
        return sampled

    def _sample(self, state: _State, digest: int) -> int:
        """The next token of the request, which has it then."""
        tokens = state.token_ids
        if not state.greedy:
            digest = mix(digest ^ state.seed, len(tokens) - state.num_prompt_tokens)
        token = self._first + (digest >> 13) % self._span
        tokens.append(token)
        return token

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    @property
    def row_parts(self) -> int:
        return 0 if self.info.states is None else 1

    def cache_identity(self) -> str:
        return f"simulated {self.info.kv_groups} {self.info.states is not None}"

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self._cache.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[npt.NDArray[np.uint8]]) -> None:
        for block_id, block in zip(block_ids, contents, strict=True):
            self._cache.write(block_id, block)

    def reset(self) -> None:
        self._states.clear()
        self._under_way.clear()

    def close(self) -> None:
        """Also ends a step that stalls, from another thread."""
        self._closed.set()


def _cache_of(info: ModelInfo) -> PagedDigests:
    if info.states is not None:
        return RecurrentDigests(info.kv_groups, info.num_blocks, info.states)
    return PagedDigests(info.kv_groups, info.num_blocks)


def _state_of(request: NewRequest) -> _State:
    params = request.params
    return _State(
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        tables=[list(block_ids) for block_ids in request.block_ids],
        pooled=isinstance(params, PoolingParams),
        greedy=isinstance(params, SamplingParams) and params.temperature == 0,
        seed=request.seed,
        origin=origin_of(request.adapter),
    )


def _vector(digest: int) -> list[float]:
    """Numbers between -1 and 1 that 32-bit floats hold exactly."""
    return [(mix(digest, n) >> 48) / 2**15 - 1 for n in range(_POOLED_SIZE)]
