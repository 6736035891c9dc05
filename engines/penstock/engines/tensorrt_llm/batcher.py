"""TensorRT-LLM's LLM API as a ContinuousBatcher. Not yet run on a GPU."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tensorrt_llm import SamplingParams
from tensorrt_llm.llmapi import GuidedDecodingParams

from penstock.engines.autonomous.output_pipe import OutputPipe
from penstock.engines.contract.continuous_batcher import BatcherOutput, StartRequest
from penstock.engines.contract.messages import Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.adapter_slots import WithAdapters
from penstock.engines.tensorrt_llm.adapters import TensorRTLLMAdapters
from penstock.engines.tensorrt_llm.config import CheckpointFacts, TensorRTLLMConfig
from penstock.engines.tensorrt_llm.contract import IterationSample
from penstock.engines.tensorrt_llm.sampling import BACKEND, TRTLLM_SAMPLER, bias, guide, sampling_arguments, stop_tokens
from penstock.engines.tensorrt_llm.streams import OutputReader, Streams, TrtllmRequest
from penstock.engines.tensorrt_llm.watchdog import Patience, Watchdog
from penstock.kvcache import KVGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TensorRTLLMLoop:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Has it called on the loop, soon. From any thread."""
        self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits until it has run on the loop. Not from the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        """Cancels what runs on the loop."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_INTERVAL = 0.5
"""Seconds between two looks at the watchdog."""
_FIRST_ANSWER = 600.0
"""Seconds that the first request may take: kernels are compiled for it."""
_FAREWELL = 30.0
"""Seconds that TensorRT-LLM gets to end its processes; after that they are left to the end of this one."""


class TensorRTLLMBatcher(WithAdapters[TensorRTLLMAdapters]):
    """Implements ContinuousBatcher and AdapterHost.

    TensorRT-LLM runs by itself, in processes of its own. A thread follows its answers on an asyncio loop; `step` only
    fetches what has come, and `wakeup` says when.
    """

    def __init__(
        self,
        llm: Any,
        adapters: TensorRTLLMAdapters,
        config: TensorRTLLMConfig,
        checkpoint: CheckpointFacts,
        version: str,
        clock: Callable[[], float],
        *,
        patience: Patience = Patience(),  # noqa: B008 (it is frozen)
        interval: float = _INTERVAL,
        farewell: float = _FAREWELL,
    ) -> None:
        """`llm`: TensorRT-LLM's LLM. Runs a first request of one token. Raises EngineError when it fails."""
        self._llm = llm
        self._checkpoint = checkpoint
        self._sampler = config.engine_args.get("sampler_type", "auto")
        self._guides = config.engine_args.get(BACKEND)
        self._adapters = adapters
        self._pipe = OutputPipe()
        self.wakeup: int | None = self._pipe.wakeup
        self.watchdog = Watchdog(config.max_num_seqs, patience, clock)
        self._lock = threading.Lock()
        """Guards the orders."""
        self._orders: list[TrtllmRequest | list[int]] = []
        self._farewell = farewell
        self._thread = TensorRTLLMLoop("tensorrt-llm")
        try:
            self._streams, sample = self._thread.run(self._set_up(interval))
        except BaseException:
            self.close()
            raise
        self.info = _info(config, checkpoint, version, sample, supports_logprobs=self._sampler != TRTLLM_SAMPLER)

    async def _set_up(self, interval: float) -> tuple[Streams, IterationSample]:
        one_token = SamplingParams(end_id=-1, pad_id=0, max_tokens=1, top_k=1, detokenize=False)
        probe = {"inputs": [0], "sampling_params": one_token, "streaming": True}
        streams = Streams(self._llm, self._pipe, self.watchdog, probe, interval)
        sample = await streams.first_sample(_FIRST_ANSWER)
        streams.num_free_blocks = sample.num_blocks
        streams.watch()
        return streams, sample

    @property
    def num_free_blocks(self) -> int:
        """By TensorRT-LLM's newest statistics, which are some tenths of a second old."""
        return self._streams.num_free_blocks if self.watchdog.is_busy else self.info.num_blocks

    def start(self, request: StartRequest) -> None:
        params, checkpoint = request.params, self._checkpoint
        stops = stop_tokens(params, checkpoint.eos_token_ids)
        sampling = SamplingParams(
            **sampling_arguments(request, stops, self._sampler),
            embedding_bias=bias(params.logit_bias, checkpoint.vocab_size),
            guided_decoding=self._guide(params.grammar),
        )
        arguments = {
            "inputs": request.prompt_token_ids,
            "sampling_params": sampling,
            "lora_request": self._adapters[request.adapter],
            "streaming": True,
            "cache_salt": request.cache_salt or None,
        }
        blocks = -(-len(request.prompt_token_ids) // self.info.block_size)
        self._order(
            TrtllmRequest(request.id, arguments, OutputReader(request, stops, checkpoint.eos_token_ids), blocks)
        )

    def _guide(self, grammar: Grammar | None) -> Any:
        return None if grammar is None else GuidedDecodingParams(**guide(grammar, str(self._guides)))

    def abort(self, ids: Sequence[int]) -> None:
        self._order(list(ids))

    def _order(self, order: TrtllmRequest | list[int]) -> None:
        """Orders of one step of the engine core wake the thread once, and keep their order."""
        with self._lock:
            self._orders.append(order)
            is_first = len(self._orders) == 1
        if is_first:
            self._thread.call(self._carry_out)

    def _carry_out(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            if isinstance(order, TrtllmRequest):
                self._streams.begin(order)
            else:
                for request_id in order:
                    self._streams.abort(request_id)

    def step(self) -> BatcherOutput:
        return self._pipe.fetch()

    def reset_prefix_cache(self) -> None:
        """`ContinuousBatcher.reset_prefix_cache`: TensorRT-LLM's LLM API has no such call."""
        raise UnsupportedError("TensorRT-LLM cannot empty its prefix cache.")

    def close(self) -> None:
        """Does not wait for ever: TensorRT-LLM joins its workers, which may hang."""
        if self.wakeup is None:
            return
        self.wakeup = None
        self._thread.stop()
        end = threading.Thread(target=self._llm.shutdown, name="tensorrt-llm-shutdown", daemon=True)
        end.start()
        end.join(self._farewell)
        if end.is_alive():
            logger.error("TensorRT-LLM does not end its processes within %.0f s", self._farewell)
        self._pipe.close()


def _info(
    config: TensorRTLLMConfig,
    checkpoint: CheckpointFacts,
    version: str,
    sample: IterationSample,
    *,
    supports_logprobs: bool,
) -> ModelInfo:
    devices = config.tensor_parallel_size * config.pipeline_parallel_size
    precision = checkpoint.quantization or checkpoint.precision
    return ModelInfo(
        vocab_size=checkpoint.vocab_size,
        max_model_len=checkpoint.max_model_len,
        kv_groups=(KVGroup(sample.block_size),),
        num_blocks=sample.num_blocks,
        eos_token_ids=checkpoint.eos_token_ids,
        runner=f"tensorrt_llm {version}, cuda x{devices}, {precision}, kv {config.kv_cache_dtype}, own scheduler",
        supports_logprobs=supports_logprobs,
        supports_grammars=bool(config.engine_args.get(BACKEND)),
    )
