"""A stand-in for the package `tensorrt_llm` (1.2): the signatures that the engine uses, no GPU and no weights.

`installed()` puts it into sys.modules. `LLM` "computes" in a thread, one token for each request in an iteration, and
answers, counts and forgets as the real one's PyTorch executor was read to do; `Faults` make it misbehave as the real
one is known to. Nothing in here that the engine does not use: tests/unit/engines/tensorrt_llm/test_contract.py sees to
that. It is no proof that TensorRT-LLM does the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

VOCAB_SIZE = 384
BLOCK = 32


@dataclass
class Faults:
    abort: Literal["obeyed", "ignored", "forgotten"] = "obeyed"
    """ignored: the request runs on; forgotten: it stops, and never says so."""
    poison: int | None = None
    """A token; a prompt that has it fails."""
    hangs: bool = False
    mute: bool = False
    """No statistics."""
    stats: dict[str, Any] | None = None
    """These instead of true ones."""
    no_logprob: bool = False
    """Of the sampled token."""


# -- tensorrt_llm.llmapi.llm_args, tensorrt_llm.lora_helper, tensorrt_llm.sampling_params


class KvCacheConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    tokens_per_block: int = BLOCK


@dataclass
class LoraConfig:
    lora_target_modules: list[str] = field(default_factory=list)
    max_lora_rank: int = 64
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class TorchLlmArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    model: str
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    backend: str | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    enable_chunked_prefill: bool = False
    enable_iter_perf_stats: bool = False
    lora_config: LoraConfig | None = None
    sampler_type: str = "auto"
    guided_decoding_backend: str | None = None


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    detokenize: bool = True


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


# -- tensorrt_llm.executor


class RequestError(RuntimeError):
    pass


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class _Mailbox:
    """From the engine's thread to the loop on which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._event = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def get(self, patience: float | None = None) -> Any:
        while not self._items:
            async with asyncio.timeout(patience):
                await self._event.wait()
            self._event.clear()
        return self._items.popleft()


class GenerationResultBase:
    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams, key: tuple[Any, ...]) -> None:
        self.cached_tokens = 0
        self._llm = llm
        self._tokens = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._params = params
        self._key = key
        self._outputs = [CompletionOutput()]
        self._done = False
        self._mailbox = _Mailbox()


class RequestOutput(GenerationResultBase):
    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._llm.abort(self)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        answer = await self._mailbox.get()
        if isinstance(answer, Exception):
            raise answer
        token, row, reason, self.cached_tokens = answer
        output = self._outputs[0]
        self._done = reason is not None
        output.finish_reason = reason
        if token is not None:
            output.token_ids.append(token)
            if row is not None:
                output.logprobs.append(row)
        return self


class IterationResult:
    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        self._done = False
        self._timeout = 2.0

    def mark_undone(self) -> None:
        self._done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        try:
            found: dict[str, Any] = json.loads(await self._mailbox.get(self._timeout))
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return found


# -- tensorrt_llm


def next_token(tokens: Sequence[int], key: tuple[Any, ...] = ()) -> int:
    """What follows; neither of the first three tokens of the vocabulary."""
    return 3 + zlib.crc32(repr((list(tokens), key)).encode()) % (VOCAB_SIZE - 3)


def greedy(prompt: Sequence[int], count: int, adapter: str = "") -> list[int]:
    """What the stand-in answers to a greedy request."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, (adapter,)))
    return tokens[len(prompt) :]


class LLM:
    """`num_blocks` is as many as max_tokens of the KvCacheConfig makes, or 64."""

    def __init__(self, **arguments: Any) -> None:
        self.args = TorchLlmArgs(**arguments)
        self.faults = Faults()
        cache = self.args.kv_cache_config
        self.num_blocks = (cache.max_tokens or 64 * BLOCK) // cache.tokens_per_block
        self.aborts = 0
        self.is_shut_down = False
        self._active: list[RequestOutput] = []
        self._cached: set[tuple[Any, ...]] = set()
        self._statistics: IterationResult | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        if sampling_params is None or sampling_params.end_id is None or not streaming or max(inputs) >= VOCAB_SIZE:
            raise ValueError("the stand-in streams, knows no tokenizer, and no token that is out of range")
        if self._statistics is None:
            self._statistics = IterationResult()
        self._statistics.mark_undone()
        adapter = lora_request.lora_name if lora_request else ""
        output = RequestOutput(self, list(inputs), sampling_params, (adapter, cache_salt))
        with self._changed:
            self._active.append(output)
            self._changed.notify()
        return output

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        assert self._statistics is not None
        self._statistics._timeout = timeout or 0.0
        return self._statistics

    def shutdown(self) -> None:
        with self._changed:
            self.is_shut_down = True
            self._changed.notify()
        self._thread.join()

    def abort(self, output: RequestOutput) -> None:
        with self._changed:
            self.aborts += 1
            if output in self._active and self.faults.abort != "ignored":
                self._active.remove(output)
                if self.faults.abort == "obeyed":
                    output._mailbox.put((None, None, "cancelled", 0))
            self._changed.notify()

    def die(self, error: Exception) -> None:
        """Not of the real one: an error of its workers, which the next one to look for an answer finds."""
        with self._changed:
            self._active[0]._mailbox.put(error)
            self._active.clear()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def _run(self) -> None:
        with self._changed:
            while not self.is_shut_down:
                if self._active and not self.faults.hangs:
                    self._iterate()
                self._changed.wait(0.0005 if self._active else None)

    def _iterate(self) -> None:
        limit = self.args.max_batch_size or 8
        working = self._active[:limit]
        for output in working:
            self._advance(output)
        if self._statistics is not None and not self.faults.mute:
            used = sum(-(-len(output._tokens) // BLOCK) for output in self._active[:limit])
            cache = {"maxNumBlocks": self.num_blocks, "freeNumBlocks": self.num_blocks - used, "tokensPerBlock": BLOCK}
            stats = self.faults.stats or {"numActiveRequests": len(working), "kvCacheStats": cache}
            self._statistics._mailbox.put(json.dumps(stats))

    def _advance(self, output: RequestOutput) -> None:
        params, tokens = output._params, output._tokens
        if self.faults.poison in tokens:
            self._active.remove(output)
            output._mailbox.put(RequestError("poisoned"))
            return
        cached = self._look_up(output) if len(tokens) == output._num_prompt_tokens else 0
        token = next_token(tokens, (output._key[0], params.seed) if params.seed else output._key[:1])
        if params.embedding_bias is not None:
            token = int(params.embedding_bias.argmax())
        tokens.append(token)
        stops = {params.end_id, *(params.stop_token_ids or ())}
        count = len(tokens) - output._num_prompt_tokens
        reason = None
        if token in stops and count >= (params.min_tokens or 0):
            reason = "stop"
        elif count >= params.max_tokens or len(tokens) >= (self.args.max_seq_len or 1 << 30):
            reason = "length"
        if reason is not None:
            self._active.remove(output)
        if token == params.end_id and self.args.sampler_type == "TRTLLMSampler":
            output._mailbox.put((None, None, reason, cached))  # it keeps the end to itself
        else:
            output._mailbox.put((token, self._row(token, params.logprobs), reason, cached))

    def _row(self, token: int, count: int | None) -> dict[int, Logprob] | None:
        if count is None:
            return None
        row = {(token + i) % VOCAB_SIZE: Logprob(-0.5 * (i + 1), i + 1) for i in range(count)}
        if self.faults.no_logprob:
            del row[token]
        return row

    def _look_up(self, output: RequestOutput) -> int:
        """Tokens of the prompt that are cached; the whole prompt is from now on."""
        if not self.args.kv_cache_config.enable_block_reuse:
            return 0
        prompt = output._tokens[: output._num_prompt_tokens]
        prefixes = [(output._key, tuple(prompt[:n])) for n in range(BLOCK, len(prompt) + 1, BLOCK)]
        found = sum(prefix in self._cached for prefix in prefixes)
        self._cached.update(prefixes)
        return min(found * BLOCK, len(prompt) - 1)


CONTENTS: dict[str, tuple[Any, ...]] = {
    "tensorrt_llm": (LLM, SamplingParams),
    "tensorrt_llm.llmapi": (GuidedDecodingParams, RequestOutput),
    "tensorrt_llm.llmapi.llm_args": (KvCacheConfig, TorchLlmArgs),
    "tensorrt_llm.lora_helper": (LoraConfig,),
    "tensorrt_llm.executor": (),
    "tensorrt_llm.executor.request": (LoRARequest,),
    "tensorrt_llm.executor.result": (CompletionOutput, GenerationResultBase, IterationResult, Logprob),
    "tensorrt_llm.executor.utils": (RequestError,),
}
_BOUND = ("adapters", "batcher", "streams")
"""Modules of the engine that import the package: they must not keep the stand-in."""


@contextmanager
def installed() -> Iterator[None]:
    """The stand-in instead of whatever is there."""
    bound = [f"penstock.engines.tensorrt_llm.{name}" for name in _BOUND]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name in bound or _is_package(name)}
    for name, contents in CONTENTS.items():
        module = ModuleType(name, "a stand-in")
        for thing in contents:
            setattr(module, thing.__name__, thing)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name in bound or _is_package(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _is_package(name: str) -> bool:
    return name.partition(".")[0] == "tensorrt_llm"
