"""Model runners on vLLM's executor; on a CPU, the KV cache can be read and written from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from vllm.sampling_params import SamplingParams as VLLMSamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.output import SchedulerOutput as VLLMSchedulerOutput

from penstock.engines import __version__
from penstock.engines.contract.messages import Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import EngineError
from penstock.engines.host.content_digest import model_digests
from penstock.engines.kit.adapter_slots import WithAdapters
from penstock.engines.kit.block_rows import Bytes
from penstock.engines.kit.grammars import Grammars
from penstock.engines.vllm.adapters import VLLMAdapters
from penstock.engines.vllm.block_memory import BlockMemory, cache_tensors
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.model_info import description, end_token_ids, kv_groups, number_types, read_output
from penstock.engines.vllm.sampling import to_vllm
from penstock.engines.vllm.start import start_for_steps
from penstock.engines.vllm.step import (
    LiveRequest,
    PreparedStep,
    StepBuilder,
    VllmRequestRow,
    VLLMRequestTable,
    to_vllm_blocks,
    usable_blocks,
)

P = ParamSpec("P")
T = TypeVar("T")


class _UnderWay(NamedTuple):
    step: SchedulerOutput
    rows: list[VllmRequestRow]
    result: Future[Callable[[], Any]]
    """Once it has begun on the device: a function that waits for vLLM's result."""


class VLLMRunner(WithAdapters[VLLMAdapters]):
    """A `ModelRunner` and `AdapterHost`. Loading raises UnsupportedError for a model that it cannot drive.

    vLLM lives on a thread of its own, which does one thing after the other: while a step computes there, its successor
    is scheduled, translated and waits in line. Where vLLM schedules asynchronously (CUDA), a step has begun when it is
    queued on the device, and its result is waited for here.
    """

    def __init__(self, config: VLLMConfig, version: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._under_way: deque[_UnderWay] = deque()
        self._failed = False
        """A step has failed: what was handed out behind it must not run."""
        try:
            self._core = self._call(start_for_steps, config, version)
        except BaseException:
            self._thread.shutdown()
            raise
        self._executor = self._core.model_executor
        settings = self._core.vllm_config
        self._eos = end_token_ids(settings.model_config, config.model_dir)
        self._draws_by_position = bool(settings.use_v2_model_runner)
        self._adapters = self._call(VLLMAdapters, self._executor, config)
        cache = self._core.scheduler.kv_cache_config
        groups = kv_groups(cache)
        asynchronous = bool(settings.scheduler_config.async_scheduling)
        sends_tokens = config.pipeline_parallel_size > 1 and not asynchronous
        self._max_steps = 1 if sends_tokens else max(2, settings.max_concurrent_batches)
        self._builder = StepBuilder(
            self._sampling_of,
            self._adapters,
            groups,
            introduces_resumed=self._draws_by_position,
            sends_tokens=sends_tokens,
        )
        self._info = ModelInfo(
            vocab_size=settings.model_config.get_vocab_size(),
            max_model_len=settings.model_config.max_model_len,
            kv_groups=groups,
            num_blocks=usable_blocks(cache.num_blocks),
            eos_token_ids=self._eos,
            runner=description(version, settings),
            numerics=number_types(settings),
            supports_grammars=True,
        )
        self._grammars = Grammars(config.model_dir, self._info)
        self._table = VLLMRequestTable(self._grammars.start)
        self._masks = StepMasks(self._grammars)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_steps_in_flight(self) -> int:
        return self._max_steps

    def submit(self, step: SchedulerOutput) -> None:
        """`ModelRunner.submit`."""
        prepared = self._builder.build(step, self._table)
        begun = self._thread.submit(self._begin, prepared)
        self._under_way.append(_UnderWay(step, prepared.rows, begun))

    def collect(self) -> ModelRunnerOutput:
        """`ModelRunner.collect`."""
        step, rows, begun = self._under_way.popleft()
        return read_output(step, rows, self._table, begun.result()())

    def reset(self) -> None:
        """`ModelRunner.reset`."""
        for _, _, begun in self._under_way:
            if not begun.cancel():
                with suppress(Exception):  # whatever became of it: it is over
                    begun.result()()
        self._under_way.clear()
        self._table.clear()
        self._call(self._forget, self._table.take_finished())

    def compile_grammar(self, grammar: Grammar) -> Any:
        """`GrammarHost.compile_grammar`."""
        return self._grammars.compile(grammar)

    def is_worn_out(self, compiled: Any) -> bool:
        """`GrammarHost.is_worn_out`."""
        return self._grammars.is_worn_out(compiled)

    def install_adapter(self, key: str, prepared: Path) -> None:
        """`AdapterHost.install_adapter`."""
        self._call(self._adapters.install, key, prepared)

    def unload_adapter(self, key: str) -> None:
        self._call(self._adapters.unload, key)

    def close(self) -> None:
        """Ends vLLM's workers and frees their memory; the runner cannot be used afterwards."""
        self._call(self._core.shutdown)
        self._thread.shutdown()

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs it where vLLM lives, behind the steps under way."""
        return self._thread.submit(function, *args, **kwargs).result()

    def _begin(self, prepared: PreparedStep) -> Callable[[], Any]:
        """On vLLM's thread."""
        if self._failed:
            raise EngineError("a step before this one failed")
        self._failed = True
        if prepared.restored:
            self._executor.collective_rpc("penstock_restore", args=(prepared.restored,))
        futures = [self._executor.execute_model(prepared.output, non_block=True)]
        if prepared.output.total_num_scheduled_tokens:
            masks = self._masks.of(prepared.rows)
            futures.append(self._executor.sample_tokens(masks, non_block=True))
            self._masks.sampled(prepared.rows, futures[-1])
        for future in futures:
            if future.done():
                future.result()  # raises what went wrong
        self._failed = False
        return lambda: [future.result() for future in futures][-1]

    def _forget(self, names: set[str]) -> None:
        """On vLLM's thread: the workers forget these requests, and a step that may have failed half-way."""
        self._masks.forget()
        self._executor.collective_rpc("penstock_abandon")
        finished = VLLMSchedulerOutput.make_empty()
        finished.finished_req_ids = names
        self._executor.execute_model(finished)
        self._failed = False

    def _sampling_of(self, request: LiveRequest, score_prompt: bool) -> VLLMSamplingParams:
        return to_vllm(request.params, self._eos, request.seed, score_prompt, self._draws_by_position)


class StepMasks:
    """Follows outputs through their grammars on vLLM's thread. There a step is sampled before its result is taken in
    elsewhere, and the next step's masks need its tokens."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._sampled: deque[tuple[list[VllmRequestRow], Future[Any]]] = deque()
        """Results with tokens that grammars have not taken in yet."""

    def of(self, rows: Sequence[VllmRequestRow]) -> GrammarOutput | None:
        """For a step of these that is about to sample. Waits for the steps before it, if they sampled for grammars."""
        while self._sampled:
            self._take_in(*self._sampled.popleft())
        masked = [
            (name, request.grammar)
            for request, name, samples in rows
            if samples and request.grammar is not None and not request.grammar.is_free
        ]
        if not masked:
            return None
        masks = self._grammars.bit_masks([grammar for _, grammar in masked])
        return GrammarOutput([name for name, _ in masked], masks)

    def sampled(self, rows: Sequence[VllmRequestRow], result: Future[Any]) -> None:
        """A step of these has begun to sample."""
        followed = [row for row in rows if row.samples and row.request.grammar is not None]
        if followed:
            self._sampled.append((followed, result))

    def forget(self) -> None:
        """The results of steps under way will not count."""
        self._sampled.clear()

    def _take_in(self, rows: Sequence[VllmRequestRow], result: Future[Any]) -> None:
        output = result.result()
        for request, name, _ in rows:
            for token_id in output.sampled_token_ids[output.req_id_to_index[name]]:
                if request.grammar is not None:
                    request.grammar.append(int(token_id))


class VLLMHostRunner(VLLMRunner):
    """A `VLLMRunner` and `BlockHost`, on one device."""

    def __init__(self, config: VLLMConfig, version: str) -> None:
        super().__init__(config, version)
        self._config = config

    @cached_property
    def _memory(self) -> BlockMemory:
        """Looked for when it is needed: a model whose cache has another form runs as well."""
        num_blocks = self._core.scheduler.kv_cache_config.num_blocks
        return BlockMemory(self._call(cache_tensors, self._executor), num_blocks)

    @property
    def block_bytes(self) -> int:
        """`BlockHost.block_bytes`"""
        return self._memory.block_bytes

    row_parts = 0
    """`BlockHost.row_parts`"""

    def cache_identity(self) -> str:
        """`BlockHost.cache_identity`. For each kind of processor vLLM has other kernels and layouts."""
        config = self._config
        settings = (self.info.runner, config.quantization, sorted(config.engine_args.items()))
        processor = torch.backends.cpu.get_cpu_capability()
        return repr((__version__, settings, model_digests(config.model_dir), processor, self._memory.layout))

    def read_blocks(self, block_ids: Sequence[int]) -> Bytes:
        """`BlockHost.read_blocks`"""
        return self._memory.read(to_vllm_blocks(block_ids))

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[Bytes]) -> None:
        """`BlockHost.write_blocks`"""
        blocks = to_vllm_blocks(block_ids)
        self._memory.write(blocks, contents)
        self._table.tainted.difference_update(blocks)
