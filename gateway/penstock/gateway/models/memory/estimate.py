"""An estimate of the memory that a model will need, by its files and settings, before anything is loaded.

The factors and base costs were measured with random models of 7, 60 and 300 million parameters in bf16 and f32 on
Linux (docs/operations.md has the ratios); what GPUs need beside weights and cache has not yet been measured on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.engines.errors import PenstockError
from penstock.engines.formats.model_files import read_json
from penstock.engines.formats.model_settings import text_settings
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.memory import parse_memory
from penstock.engines.kit.cache_size import StateSpace, state_interval
from penstock.engines.offload import READING_BYTES, WRITING_BYTES
from penstock.engines.openvino.numerics import (
    QUANTIZED_KV,
    ModelFacts,
    Numerics,
    StoredTypes,
    Wish,
    quantized_bytes,
)
from penstock.engines.openvino.trials import predict
from penstock.engines.registry import EngineSpec
from penstock.engines.vllm.contract import is_cpu_build
from penstock.gateway.models.memory.budget import CacheWish, Demand, MemoryNeeds
from penstock.gateway.models.memory.model_size import FLOAT_BYTES, ModelShape, StoredSize, read_shape, stored_sizes

_MIB = 1 << 20
_PROCESS = {
    "openvino": 115 * _MIB,
    "torch": 390 * _MIB,
    "vllm": 1024 * _MIB,
    "tensorrt_llm": 1024 * _MIB,
    "simulated": 32 * _MIB,
}
"""Of an engine's process with its libraries and without a model. vllm's holds what its kernels keep for each shape of a
step, 200 to 400 MiB after some thousand requests. tensorrt_llm's is a guess."""
_CUDA_HOST = 1024 * _MIB
"""More that a process takes of the host's memory for CUDA; a guess."""
_CUDA_DEVICE = 512 * _MIB
"""What CUDA takes of a GPU for a process; a guess."""
_PACKED = 1.35
"""vLLM on CPUs keeps some matrices as they are, beside those that it has packed for its kernels."""
_TWO_LANES = 256 * _MIB
"""The openvino engine compiles smaller models for two numbers of threads, each with packed weights of its own."""
_USEFUL_TOKENS = 2048
"""A cache for fewer is not worth a start, unless the model's context is shorter. vLLM wants the whole context."""
_VLLM_CPU_CACHE = 4 << 30
_BYTES = {"fp8": 1.0, "bf16": 2.0, "f16": 2.0, "f32": 4.0}
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.7}
"""Of a weight in the copy that kernels work on; int4 keeps some matrices in 8 bits. Another copy is in a file, unless
there is no cache of weights."""
_HELD_BYTES = {"int2": 0.5, "int4": 0.5, "MXFP4": 0.5, "int8": 1.0, "I8": 1.0}
"""Of a weight in a quantized checkpoint, which is held as it is."""
_BECOMES = {"F8_E4M3": "bf16", "fp4": "int4"}
_WORDS = "I32"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_ANY_HEAD = 64
"""Head size of a decoder whose config.json is not understood."""
_SAFETENSORS_TYPES = {*FLOAT_BYTES, *_HELD_BYTES, *_BECOMES, _WORDS, "I64", "U8", "BOOL"}


def estimate(spec: EngineSpec) -> Demand:
    """Reads the model's files: not for the event loop."""
    process = _PROCESS.get(spec.runner, 0) + _offload(spec)
    options = spec.options
    if "model_dir" not in options:  # the simulated engine
        return Demand(host=MemoryNeeds(rest=process))
    folder = Path(options["model_dir"])
    sizes, shape = stored_sizes(folder), read_shape(folder)
    gpus = _gpus(spec)
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    parts = workers if gpus else 1
    weights = _weights(spec.runner, sizes, options, shape, on_gpu=bool(gpus))
    if options.get("draft_model_dir"):
        draft = Path(options["draft_model_dir"])
        sizes_of_draft = stored_sizes(draft)
        weights += _weights(spec.runner, sizes_of_draft, options, read_shape(draft), on_gpu=False, is_draft=True)
    if options.get("mtp") and shape is not None:  # the head for logits is compiled twice
        weights += int(shape.vocab_size * shape.hidden_size * _item(spec.runner, sizes, options, shape))
    model = MemoryNeeds(
        weights=weights // parts,
        cache=_cache(spec, shape, sizes, on_gpu=bool(gpus), workers=workers),
        rest=_step_bytes(shape, options),
    )
    if not gpus:
        host = MemoryNeeds(weights=model.weights, cache=model.cache, rest=model.rest + process * workers)
        sets_cache = model.cache.fixed is None
        return Demand(host=host, workers=workers, sets_cache=sets_cache, hints=_hints(spec.runner, gpu_share=False))
    share = options.get("memory_share")
    return Demand(
        host=MemoryNeeds(rest=(process + _CUDA_HOST) * workers),
        device=MemoryNeeds(weights=model.weights, cache=model.cache, rest=model.rest + _CUDA_DEVICE),
        gpus=gpus,
        gpu_share=share,
        # vLLM fills its share of a GPU by itself; TensorRT-LLM would take a share of what its weights leave free
        sets_cache=model.cache.fixed is None and (spec.runner != "vllm" or options["kv_cache_memory"] is not None),
        hints=_hints(spec.runner, gpu_share=share is not None),
    )


def context_bytes(spec: EngineSpec) -> float | None:
    """What the KV cache keeps of one token, in bytes. None: the model's files are not understood. Reads them."""
    folder = Path(spec.options["model_dir"])
    shape = read_shape(folder)
    if shape is None:
        return None
    sizes = stored_sizes(folder)
    token, block = _token_bytes(spec, shape, sizes), _block_size(spec, on_gpu=False)
    return token + _states(spec, shape, sizes, token, block).bytes_beside(block) / block


def decode_bytes(spec: EngineSpec) -> int | None:
    """Bytes of weights that a step for one token of one request reads with the openvino engine: of a mixture only the
    experts that the token is sent to. None: the model's files are not understood. Reads them."""
    folder = Path(spec.options["model_dir"])
    sizes, shape = stored_sizes(folder), read_shape(folder)
    if shape is None or not sizes:
        return None
    types = _openvino_types(sizes, spec.options, shape)
    item = _BYTES[types.dtype]
    matrices = [size for size in sizes if size.is_matrix and size.dtype != _WORDS]
    num_bytes = sum(_kernel_bytes(size, _matrix_kind(size, types, spec.options), item) for size in matrices)
    per_value = num_bytes / max(1, sum(size.count for size in matrices))
    unread = _unread_values(text_settings(read_json(folder / "config.json")), shape)
    return max(0, int(num_bytes - unread * per_value))


def _kernel_bytes(size: StoredSize, kind: str, item: float) -> float:
    """Of a matrix, in the form in which kernels read it."""
    integers = _integer_bytes(size, kind)
    return size.count * min(_float_bytes(size, kind), item) if integers is None else integers


def _unread_values(settings: Mapping[str, Any], shape: ModelShape) -> float:
    """Weights that one token leaves alone: embeddings of the others, where the head has a matrix of its own, and
    experts that it is not sent to."""
    config = settings.get("text_config") or settings
    unread = 0.0 if config.get("tie_word_embeddings") else float(shape.vocab_size * shape.hidden_size)
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    used = next((config[key] for key in _EXPERTS_OF_TOKEN if config.get(key)), experts)
    inner = config.get("moe_intermediate_size") or shape.intermediate_size
    return unread + 3.0 * shape.layers * shape.hidden_size * inner * max(0, experts - used)


def _offload(spec: EngineSpec) -> int:
    """Of blocks on their way to files and back, and of those that it hands over or gets."""
    handover = spec.scheduler.handover
    if handover is not None:
        written = 0 if handover.own is None else handover.region_bytes
        return written + min(handover.region_bytes * len(handover.regions), READING_BYTES)
    if not spec.scheduler.kv_offload_dir:
        return 0
    return sum(min(spec.scheduler.kv_offload_bytes, most) for most in (WRITING_BYTES, READING_BYTES))


def _hints(runner: str, *, gpu_share: bool) -> str:
    if gpu_share:
        return "gpu_memory_utilization, tensor_parallel_size"
    return {
        "openvino": "kv_cache_memory, num_kv_blocks, weights=int8",
        "torch": "kv_cache_memory, num_kv_blocks, dtype=bf16",
        "vllm": "kv_cache_memory, num_kv_blocks, max_model_len, dtype=bf16",
    }.get(runner, "")


def _gpus(spec: EngineSpec) -> Sequence[int]:
    options, present = spec.options, visible_gpus()
    if spec.runner == "torch":
        device = options.get("device", "auto")
        if device == "auto":
            return (0,) if present and not _is_cpu_torch() else ()
        return (int(device.partition(":")[2] or 0),) if device.startswith("cuda") else ()
    if spec.runner == "tensorrt_llm" or (spec.runner == "vllm" and present and not is_cpu_build()):
        return range(options["tensor_parallel_size"] * options["pipeline_parallel_size"])
    return ()


def _is_cpu_torch() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


# Weights


def _weights(
    runner: str,
    sizes: Sequence[StoredSize],
    options: dict[str, Any],
    shape: ModelShape | None,
    *,
    on_gpu: bool,
    is_draft: bool = False,
) -> int:
    """Bytes of the weights as they will be kept, on all devices together."""
    if runner == "openvino":
        return _openvino_weights(sizes, options, _openvino_types(sizes, options, shape, is_draft=is_draft))
    item = _item(runner, sizes, options, shape)
    total = sum(size.count * item if size.dtype in FLOAT_BYTES else size.num_bytes for size in sizes)
    return int(total * (_PACKED if runner == "vllm" and not on_gpu else 1))


def _openvino_weights(sizes: Sequence[StoredSize], options: dict[str, Any], types: Numerics) -> int:
    """As stored they stay in the mapped file, of which no more than the embeddings is used later, as do a quantized
    checkpoint's that become floats, in the cache of weights; other floats that are converted are kept. Either way the
    kernels work on a packed copy, in the precision of the computation where that is smaller."""
    item = _BYTES[types.dtype]
    small = sum(size.num_bytes for size in sizes) <= _TWO_LANES and options["threads"] is None
    lanes, total = (2 if small else 1) + (types.large_steps is not None), 0.0
    copies = lanes if options["weights_cache"] else lanes + 1
    for size in sizes:
        kind = _matrix_kind(size, types, options)
        total += _openvino_matrix(size, kind, item, lanes, copies) if size.is_matrix else size.count * 4
    return int(total)


def _openvino_types(
    sizes: Sequence[StoredSize], options: dict[str, Any], shape: ModelShape | None, *, is_draft: bool = False
) -> Numerics:
    """What the engine will compute in; f32 for settings that it will refuse."""
    facts = ModelFacts(
        _stored_types(sizes),
        head_size=_ANY_HEAD if shape is None else shape.head_dim,
        is_capped=shape is not None and shape.is_capped,
        is_draft=is_draft,
    )
    wish = Wish(options["dtype"], options["weights"], options["activations"], options["kv_cache_dtype"])
    try:
        return predict(wish, facts)
    except PenstockError:
        return Numerics("f32", "f32", None, options["weights"])


def _stored_types(sizes: Sequence[StoredSize]) -> StoredTypes:
    blocks = [size for size in sizes if size.dtype not in _SAFETENSORS_TYPES]  # of GGUF
    mxfp4 = [size for size in sizes if size.dtype == "MXFP4"]
    held = {_HELD_BYTES[size.dtype] for size in sizes if size.dtype in _HELD_BYTES and size not in mxfp4}
    bits = None
    if blocks:
        blocks += mxfp4
        bits = 8 * sum(size.num_bytes for size in blocks) / sum(size.count for size in blocks)
    return StoredTypes(("int8" if 1 in held else "int4") if held else None, bits, bool(mxfp4))


def _matrix_kind(size: StoredSize, types: Numerics, options: dict[str, Any]) -> str:
    """The type in which a matrix is held; auto: as it is stored."""
    kind = options["weights"] if size.dtype == "MXFP4" else types.weights
    return _BECOMES.get(size.dtype, kind) if kind == "auto" else kind


def _integer_bytes(size: StoredSize, kind: str) -> float | None:
    """Of a matrix that kernels read as integers; None: they read floats."""
    held = _HELD_BYTES.get(size.dtype)
    if held is not None and kind in ("auto", "int8" if held == 1 else "int4"):
        return size.count * held
    return size.count * _QUANTIZED_BYTES[kind] if kind in _QUANTIZED_BYTES else None


def _float_bytes(size: StoredSize, kind: str) -> float:
    """Of one weight, before it is packed for the computation."""
    return float(FLOAT_BYTES.get(size.dtype, 4)) if kind == "auto" else _BYTES[kind]


def _openvino_matrix(size: StoredSize, kind: str, item: float, lanes: int, copies: int) -> float:
    if size.dtype == _WORDS:  # zero points
        return size.num_bytes
    integers = _integer_bytes(size, kind)
    if integers is not None:
        return integers * copies
    stored, kept = FLOAT_BYTES.get(size.dtype), _float_bytes(size, kind)
    in_file = kept == stored if stored else copies == lanes
    return size.count * (min(kept, item) * lanes + (0 if in_file else kept))


def _item(runner: str, sizes: Sequence[StoredSize], options: dict[str, Any], shape: ModelShape | None) -> float:
    """Bytes of a number in the precision of the computation."""
    if runner == "openvino":
        return _BYTES[_openvino_types(sizes, options, shape).dtype]
    dtype = options["dtype"]
    if dtype != "auto":
        return _BYTES[dtype]
    stored = max((FLOAT_BYTES.get(size.dtype, 2) for size in sizes), default=2)
    return float(stored) if runner == "torch" else 2.0  # the large engines make f16 or bf16 of f32


# Cache and steps


def _cache(
    spec: EngineSpec, shape: ModelShape | None, sizes: Sequence[StoredSize], *, on_gpu: bool, workers: int
) -> CacheWish:
    """On each GPU, or in the host's memory for all workers together."""
    options, times = spec.options, 1 if on_gpu else workers
    block = _block_size(spec, on_gpu=on_gpu)
    token = 0 if shape is None else _token_bytes(spec, shape, sizes) / workers
    states, least_states = StateSpace(0, 0, 0), StateSpace(0, 0, 0)
    if shape is not None and shape.states is not None and spec.runner not in _WITH_OUR_STATES:
        token = 0  # these have pages for states in the same pool
    elif shape is not None:
        states, least_states = (_states(spec, shape, sizes, token, block, free) for free in (2**63, 0))
        token += states.bytes_beside(block) / block
    if options.get("draft_model_dir"):
        draft = Path(options["draft_model_dir"])
        draft_shape = read_shape(draft)
        token += 0 if draft_shape is None else _token_bytes(spec, draft_shape, stored_sizes(draft))
        if draft_shape is not None and draft_shape.is_head:
            token += draft_shape.hidden_size * _item(spec.runner, sizes, options, shape)  # features
    if options.get("mtp") and shape is not None:
        features = shape.hidden_size * _item(spec.runner, sizes, options, shape)
        token += _token_bytes(spec, shape, sizes) / max(1, sum(heads.layers for heads in shape.kept)) + features
    if options["num_blocks"] is not None:
        return CacheWish(fixed=int(options["num_blocks"] * block * token + states.working_bytes) * times)
    wished = options["kv_cache_memory"]
    if wished is not None and not str(wished).strip().endswith("%"):
        return CacheWish(fixed=parse_memory(wished) * times)
    if wished is not None:
        return CacheWish(share=parse_memory(wished, free=10_000) / 10_000)
    context = options["max_model_len"] or (shape.max_len if shape is not None else _USEFUL_TOKENS)
    useful = context if spec.runner == "vllm" else min(context, _USEFUL_TOKENS)
    most = None
    if token:
        most = int(options["max_num_seqs"] * -(-context // block) * block * token + states.working_bytes) * times
    if spec.runner == "vllm":
        most = min(_VLLM_CPU_CACHE, most or _VLLM_CPU_CACHE) if not on_gpu else None
    least = int(-(-useful // block) * block * token + least_states.working_bytes) * times
    share = {True: 0.9, False: 0.5}[on_gpu] if spec.runner != "tensorrt_llm" else 1.0
    return CacheWish(share=share, least=least, most=most)


def _block_size(spec: EngineSpec, *, on_gpu: bool) -> int:
    return 16 if on_gpu and spec.runner != "tensorrt_llm" else 32


_WITH_OUR_STATES = ("openvino", "torch")


@dataclass(frozen=True, slots=True)
class _CacheOptions:
    """`CacheSettings` of an engine that is not there yet."""

    num_blocks: int | None
    kv_cache_memory: int | str | None
    max_num_seqs: int
    max_num_batched_tokens: int


def _states(
    spec: EngineSpec, shape: ModelShape, sizes: Sequence[StoredSize], token: float, block: int, free: int = 2**63
) -> StateSpace:
    """As the engine will have it, with so many bytes `free`; `token`: bytes of keys and values."""
    if shape.states is None:
        return StateSpace(0, 0, 0)
    options, item = spec.options, _item(spec.runner, sizes, spec.options, shape)
    summed = item if spec.runner == "openvino" else _BYTES["f32"]
    row = int(shape.states.convolved * item + shape.states.summed * summed)
    interval = options.get("state_interval") or state_interval(None, row, int(token * block), block)
    names = (field.name for field in fields(_CacheOptions))
    return StateSpace.of(_CacheOptions(**{name: options[name] for name in names}), interval, row, free)


def _token_bytes(spec: EngineSpec, shape: ModelShape, sizes: Sequence[StoredSize]) -> float:
    """Keys and values of one token in all layers."""
    kind = spec.options["kv_cache_dtype"]
    if spec.runner == "openvino":
        kv = _openvino_types(sizes, spec.options, shape).kv
        kind = "f32" if kv is None else kv.name
    if kind in QUANTIZED_KV:
        return sum(part.token_values * quantized_bytes(kind, part.head_dim) for part in shape.kept)
    item = _item(spec.runner, sizes, spec.options, shape) if kind == "auto" else _BYTES[kind]
    return sum(part.token_values for part in shape.kept) * item


def _step_bytes(shape: ModelShape | None, options: dict[str, Any]) -> int:
    """Activations and logits of the largest step, and room for adapters."""
    if shape is None:
        return 0
    tokens = options["max_num_batched_tokens"]
    activations = tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size) * 4
    logits = min(tokens, options["max_num_seqs"]) * shape.vocab_size * 4 * 2  # the sampler has a copy
    # what goes in and comes out of the seven matrices of a layer that an adapter may change
    sides = 9 * shape.hidden_size + 3 * shape.intermediate_size + 2 * shape.kv_heads * shape.head_dim
    adapters = options.get("max_loras", 0) * options.get("max_lora_rank", 0) * sides * shape.layers * 4
    return int(activations + logits + adapters)
