"""Estimates for models of which only the headers exist: real shapes, no weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.handover.memory import HandoverMemory
from penstock.engines.openvino import trials
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.numerics import CpuFacts
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.memory import estimate as memory_estimate
from penstock.gateway.models.memory.budget import CacheWish, Demand
from penstock.gateway.models.memory.estimate import context_bytes, decode_bytes, estimate
from penstock.gateway.models.memory.model_size import StoredSize, read_shape
from penstock.gateway.models.memory.state_shape import StateShape, read_states

GIB = 1 << 30
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TOKEN = 32 * 2 * 8 * 128 * 2
"""Bytes of keys and values of one token in bf16."""
PARAMETERS = 8_030_261_248


def save_header(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file with a hole for data; tensors are (dtype, shape, bytes of an element)."""
    entries, start = {}, 0
    for name, (dtype, shape, item) in tensors.items():
        size = math.prod(shape) * item
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    header = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + start)


def llama(dtype: str = "BF16", item: int = 2) -> dict[str, tuple[str, list[int], int]]:
    hidden, inner = 4096, 14336
    layer = {
        **{name: [hidden, hidden] for name in "qo"},
        **{name: [1024, hidden] for name in "kv"},
        **{name: [inner, hidden] for name in ("gate", "up")},
        "down": [hidden, inner],
        **{f"norm{n}": [hidden] for n in range(2)},
    }
    shapes = {f"layers.{n}.{name}": shape for n in range(32) for name, shape in layer.items()}
    shapes |= {"embed": [128256, hidden], "lm_head": [128256, hidden], "norm": [hidden]}
    return {name: (dtype, shape, item) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    save_header(tmp_path / "model.safetensors", llama())
    return tmp_path


@pytest.fixture(autouse=True)
def a_cpu_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CpuFacts(("bf16", "f32"), frozenset({"f32"}))
    monkeypatch.setattr(trials, "cpu_facts", lambda cpu: facts)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    monkeypatch.setattr(memory_estimate, "visible_gpus", lambda: 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "visible_gpus", lambda: 8)
    monkeypatch.setattr(memory_estimate, "is_cpu_build", lambda: False)
    monkeypatch.setattr(memory_estimate, "_is_cpu_torch", lambda: False)


def demand(runner: str, folder: Path, **options: Any) -> Demand:
    return estimate(engine(runner, folder, **options))


def engine(runner: str, folder: Path, **options: Any) -> EngineSpec:
    common = {
        "model_dir": str(folder),
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "weights": "auto",
        "threads": None,
        "max_model_len": None,
        "activations": "auto",
        "weights_cache": 1,
        "num_blocks": None,
        "kv_cache_memory": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 512,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    if runner in ("vllm", "tensorrt_llm"):
        common["memory_share"] = 0.9
    return EngineSpec(runner=runner, options=common | options)


@pytest.mark.parametrize(
    ("runner", "options", "bytes_each"),
    [
        ("torch", {}, 2),
        ("torch", {"dtype": "f32"}, 4),
        ("openvino", {}, 2),  # packed; the mapped file is let go
        ("openvino", {"dtype": "f32"}, 2),
        ("openvino", {"weights": "int8"}, 1),  # packed; the cache's file is let go
        ("openvino", {"weights": "int8", "weights_cache": 0}, 2),
        ("openvino", {"weights": "int4"}, 0.7),
        ("openvino", {"weights": "int4", "activations": "mixed"}, 1.4),
        ("openvino", {"weights": "f32"}, 6),  # f32, and bf16 packed
        ("openvino", {"weights": "f32", "dtype": "f32"}, 8),
        ("vllm", {}, 2.7),
    ],
)
def test_weights_as_they_are_kept(folder: Path, runner: str, options: dict[str, Any], bytes_each: float) -> None:
    assert demand(runner, folder, **options).host.weights == pytest.approx(PARAMETERS * bytes_each, rel=1e-3)


@pytest.mark.parametrize(("weights", "bytes_each"), [("auto", 2), ("int8", 1), ("int4", 0.7)])
def test_a_token_reads_all_weights_but_the_embeddings_of_others(folder: Path, weights: str, bytes_each: float) -> None:
    spec = engine("openvino", folder, weights=weights)
    assert decode_bytes(spec) == pytest.approx((PARAMETERS - 128256 * 4096) * bytes_each, rel=1e-3)
    assert context_bytes(spec) == TOKEN
    tied = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tied))
    assert decode_bytes(spec) == pytest.approx(PARAMETERS * bytes_each, rel=1e-3)


def test_floats_in_8_bits_are_read_as_what_they_become(folder: Path) -> None:
    save_header(folder / "model.safetensors", llama("F8_E4M3", 1))
    read = decode_bytes(engine("openvino", folder, dtype="f32"))
    assert read == pytest.approx((PARAMETERS - 128256 * 4096) * 2, rel=1e-3), "bf16"


def test_a_token_reads_the_experts_that_it_is_sent_to(tmp_path: Path) -> None:
    config = LLAMA_8B | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 448}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_header(tmp_path / "model.safetensors", llama())  # the experts have as many weights as one wide layer
    unread = 32 * 3 * 4096 * 448 * 28
    assert decode_bytes(engine("openvino", tmp_path)) == pytest.approx((PARAMETERS - unread) * 2, rel=1e-3)


def test_what_a_token_reads_of_files_that_are_not_understood_is_left_open(tmp_path: Path) -> None:
    spec = engine("openvino", tmp_path)
    assert decode_bytes(spec) is None
    assert context_bytes(spec) is None


def save_quantized(folder: Path, config: dict[str, Any], pack: Any) -> None:
    """With the matrices of layers as `pack` makes them of (rows, width)."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    tensors = {}
    for name, (dtype, shape, item) in llama().items():
        if name.startswith("layers.") and len(shape) == 2:
            tensors |= {f"{name}.{part}": tensor for part, tensor in pack(*shape).items()}
        else:
            tensors[name] = (dtype, shape, item)
    save_header(folder / "model.safetensors", tensors)


def gptq(rows: int, width: int) -> dict[str, tuple[str, list[int], int]]:
    groups = width // 128
    return {
        "qweight": ("I32", [width // 8, rows], 4),
        "qzeros": ("I32", [groups, rows // 8], 4),
        "scales": ("F16", [groups, rows], 2),
        "g_idx": ("I32", [width], 4),
    }


def fp8(rows: int, width: int) -> dict[str, tuple[str, list[int], int]]:
    return {"weight": ("F8_E4M3", [rows, width], 1), "weight_scale_inv": ("F32", [rows // 128, width // 128], 4)}


IN_LAYERS = PARAMETERS - 2 * 128256 * 4096
"""The rest are embeddings and head, which stay in bf16."""


@pytest.mark.parametrize(
    ("weights", "bytes_each", "of_floats"),
    [("auto", 0.52, 2), ("int4", 0.51, 0.7), ("int8", 1.02, 1), ("bf16", 2.02, 2)],
)
def test_weights_of_gptq(folder: Path, weights: str, bytes_each: float, of_floats: float) -> None:
    save_quantized(folder, {"quant_method": "gptq", "bits": 4}, gptq)
    wanted = IN_LAYERS * bytes_each + (PARAMETERS - IN_LAYERS) * of_floats
    assert demand("openvino", folder, weights=weights).host.weights == pytest.approx(wanted, rel=1e-2)


def test_weights_of_bitsandbytes(folder: Path) -> None:
    save_quantized(
        folder,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda rows, width: {"weight": ("U8", [rows * width // 2, 1], 1)},
    )
    wanted = IN_LAYERS * 0.7 + (PARAMETERS - IN_LAYERS) * 2
    assert demand("openvino", folder).host.weights == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "bytes_each", "of_floats"),
    [({}, 2, 2), ({"weights": "int8"}, 1, 1), ({"weights_cache": 0}, 4, 2)],
)
def test_weights_of_fp8(folder: Path, settings: dict[str, object], bytes_each: float, of_floats: float) -> None:
    save_quantized(folder, {"quant_method": "fp8"}, fp8)
    wanted = IN_LAYERS * bytes_each + (PARAMETERS - IN_LAYERS) * of_floats
    assert demand("openvino", folder, **settings).host.weights == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(("weights", "bytes_each"), [("auto", 0.5), ("int4", 0.5), ("int8", 1)])
def test_experts_in_mxfp4(folder: Path, weights: str, bytes_each: float) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "mxfp4"}}))
    experts, rows, groups = 128, 2880, 90
    tensors = {"down_proj_blocks": ("U8", [experts, rows, groups, 16], 1)}
    save_header(folder / "model.safetensors", tensors | {"down_proj_scales": ("U8", [experts, rows, groups], 1)})
    scales = experts * rows * groups * 4  # as f32
    found = demand("openvino", folder, weights=weights).host.weights
    assert found == experts * rows * groups * 32 * bytes_each + scales


def test_graphs_of_openvino_are_held_as_they_are(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "openvino_model.xml").touch()
    with (folder / "openvino_model.bin").open("wb") as file:
        file.truncate(4 * GIB)
    assert demand("openvino", folder).host.weights == 4 * GIB


def test_weights_in_f32_are_computed_with_as_the_engine_does(folder: Path) -> None:
    save_header(folder / "model.safetensors", llama("F32", 4))
    assert demand("torch", folder).host.weights == 4 * PARAMETERS
    assert demand("openvino", folder).host.weights == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert demand("vllm", folder).host.weights == pytest.approx(2.7 * PARAMETERS, rel=1e-3)


def test_quantized_weights_stay_as_they_are(folder: Path, gpus: None) -> None:
    save_header(folder / "model.safetensors", {"q": ("I32", [1024, 1024], 4), "s": ("F16", [1024], 2)})
    assert demand("vllm", folder).device.weights == 4 * 1024 * 1024 + 2048


def test_a_small_model_is_packed_for_two_numbers_of_threads(folder: Path) -> None:
    save_header(folder / "model.safetensors", {"q": ("BF16", [1000, 1000], 2)})
    assert demand("openvino", folder).host.weights == 4_000_000
    assert demand("openvino", folder, threads=1).host.weights == 2_000_000


def test_shards_count_and_other_copies_do_not(folder: Path) -> None:
    tensor = {"q": ("BF16", [1000, 1000], 2)}
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors", "other.safetensors"):
        save_header(folder / name, tensor)
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    assert demand("torch", folder).host.weights == 4_000_000


@pytest.mark.parametrize("runner", ["torch", "openvino", "vllm"])
def test_a_cache_of_so_many_blocks(folder: Path, runner: str) -> None:
    found = demand(runner, folder, num_blocks=100, kv_cache_memory="1GiB")
    assert (found.host.cache, found.sets_cache) == (CacheWish(fixed=100 * 32 * TOKEN), False)
    assert demand(runner, folder, num_blocks=100, dtype="f32").host.cache.fixed == 100 * 32 * TOKEN * 2


@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [("u8", 128 * (32 + 8), 32 * (128 + 8)), ("u8-u4", 128 * (32 + 8), 32 * (64 + 32)), ("u4", 128 * 24, 32 * 96)],
)
def test_a_quantized_cache_has_scales(folder: Path, kind: str, keys: int, values: int) -> None:
    """Of a head of 128 in a block of 32 tokens: 8 bytes for each channel of the keys, and for each token's values or
    32 of them."""
    found = demand("openvino", folder, num_blocks=100, kv_cache_dtype=kind)
    assert found.host.cache.fixed == 100 * 32 * 8 * (keys + values)


def test_the_cache_of_mixed_activations_is_in_8_bits(folder: Path) -> None:
    mixed, u8 = (
        demand("openvino", folder, num_blocks=100, weights="int8", activations=kind, kv_cache_dtype=cache)
        for kind, cache in (("mixed", "auto"), ("int8", "u8"))
    )
    assert mixed.host.cache == u8.host.cache


def test_a_draft_model_counts(folder: Path) -> None:
    """As one more model of the same size, with a part of each block."""
    found = demand("openvino", folder, num_blocks=100, draft_model_dir=str(folder)).host
    assert found.weights == pytest.approx(2 * 2 * PARAMETERS, rel=1e-3)
    assert found.cache.fixed == 2 * 100 * 32 * TOKEN


def test_a_draft_model_is_packed_once_beside_mixed_activations(folder: Path) -> None:
    options = {"num_blocks": 100, "weights": "int8", "draft_model_dir": str(folder)}
    assert demand("openvino", folder, activations="mixed", **options).host.weights == pytest.approx(
        3 * PARAMETERS, rel=1e-3
    )


@pytest.mark.parametrize(("block_bytes", "bytes_each"), [(144, 0.7), (210, 1.0)])
def test_blocks_of_gguf_become_what_the_engine_makes_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, bytes_each: float
) -> None:
    """Q4_K has 4.5 bits and is rounded to 4; Q6_K has 6.6 and keeps 8."""
    blocks = PARAMETERS // 256
    stored = [StoredSize("Q4_K" if block_bytes == 144 else "Q6_K", 256 * blocks, block_bytes * blocks, is_matrix=True)]
    monkeypatch.setattr(memory_estimate, "stored_sizes", lambda folder: stored)
    assert demand("openvino", folder).host.weights == pytest.approx(PARAMETERS * bytes_each, rel=1e-3)


def test_a_draft_head_counts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With keys and values of one layer, and a vector that each token has for it. A small one is compiled twice."""
    head = tmp_path_factory.mktemp("head")
    (head / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 1, "draft_vocab_size": 32000}))
    maps = {"d2t": ("I64", [32000], 8), "t2d": ("BOOL", [128256], 1)}
    save_header(head / "model.safetensors", {"fc": ("BF16", [4096, 3 * 4096], 2), **maps})
    found = demand("openvino", folder, num_blocks=100, draft_model_dir=str(head)).host
    assert found.weights == pytest.approx(2 * PARAMETERS + 2 * 2 * 3 * 4096**2, rel=1e-3)
    assert found.cache.fixed == 100 * 32 * (TOKEN + TOKEN // 32 + 2 * 4096)


def test_the_models_own_draft_head_counts(folder: Path) -> None:
    """With a head for logits of its own, keys and values of one layer, and a vector for each token."""
    found = demand("openvino", folder, num_blocks=100, mtp=True).host
    assert found.weights == pytest.approx(2 * PARAMETERS + 2 * 4096 * 128256, rel=1e-3)
    assert found.cache.fixed == 100 * 32 * (TOKEN + TOKEN // 32 + 2 * 4096)


def test_a_cache_of_so_many_bytes(folder: Path) -> None:
    found = demand("openvino", folder, kv_cache_memory="1GiB")
    assert (found.host.cache, found.sets_cache) == (CacheWish(fixed=GIB), False)


def test_blocks_on_their_way_to_files() -> None:
    spec = EngineSpec(runner="simulated")
    before = estimate(spec).host.rest
    for limit, more in ((GIB, 768 << 20), (1000, 2000)):
        offload = SchedulerConfig(kv_offload_dir="x", kv_offload_bytes=limit)
        assert estimate(msgspec.structs.replace(spec, scheduler=offload)).host.rest == before + more


def test_blocks_that_are_handed_over() -> None:
    """A prefill replica has what it writes, and all have what they read on its way."""
    before = estimate(EngineSpec(runner="simulated")).host.rest
    memory = HandoverMemory(2, 1000)
    for own, more in ((None, 1000), (1, 1500)):
        spec = EngineSpec(runner="simulated", scheduler=SchedulerConfig(handover=memory.config(own)))
        assert estimate(spec).host.rest == before + more


def test_a_cache_of_a_share(folder: Path) -> None:
    found = demand("openvino", folder, kv_cache_memory="40%")
    assert (found.host.cache, found.sets_cache) == (CacheWish(share=0.4), True)


@pytest.mark.parametrize(
    ("runner", "options", "wish"),
    [
        ("openvino", {}, CacheWish(share=0.5, least=2048 * TOKEN, most=256 * 8192 * TOKEN)),
        ("openvino", {"max_model_len": 100}, CacheWish(share=0.5, least=128 * TOKEN, most=256 * 128 * TOKEN)),
        ("torch", {"max_num_seqs": 3}, CacheWish(share=0.5, least=2048 * TOKEN, most=3 * 8192 * TOKEN)),
        # vLLM does not start with less than one request of full length
        ("vllm", {}, CacheWish(share=0.5, least=8192 * TOKEN, most=4 * GIB)),
    ],
)
def test_a_cache_that_nobody_has_sized(folder: Path, runner: str, options: dict[str, Any], wish: CacheWish) -> None:
    found = demand(runner, folder, **options)
    assert (found.host.cache, found.sets_cache) == (wish, True)


def test_steps_and_adapters_count(folder: Path) -> None:
    def rest(**options: Any) -> int:
        return demand("torch", folder, **options).host.rest

    logits = 512 * 128256 * 4 * 2
    assert rest(max_num_seqs=512) - rest(max_num_seqs=1) == logits - logits // 512
    assert rest(max_num_batched_tokens=1024) > rest()
    # r * (inputs + outputs) of q, k, v, o, gate, up and down
    sides = 2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert rest(max_loras=2, max_lora_rank=16) - rest() == 2 * 16 * sides * 32 * 4


@pytest.mark.parametrize(
    "config",
    [
        "not JSON",
        "[]",
        "{}",
        '{"architectures": null}',
        json.dumps(LLAMA_8B | {"num_hidden_layers": "many"}),
        json.dumps(LLAMA_8B | {"num_attention_heads": 0, "num_key_value_heads": 0}),
        json.dumps(LLAMA_8B | {"kv_lora_rank": 512}),
        json.dumps(LLAMA_8B | {"layer_types": ["full_attention", "linear_attention"]}),
    ],
)
def test_what_is_not_understood_counts_with_weights_and_process_alone(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    found = demand("torch", folder, num_blocks=100)
    assert (found.host.weights, found.host.cache.size(GIB)) == (2 * PARAMETERS, 0)
    assert 0 < found.host.rest < GIB


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_damaged_weights_are_left_to_the_engine(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert demand("torch", folder).host.weights == 0


def test_the_text_model_of_a_larger_one(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"text_config": LLAMA_8B}))
    assert demand("torch", folder, num_blocks=1).host.cache.fixed == 32 * TOKEN


def test_vllm_on_gpus_takes_its_share_of_each(folder: Path, gpus: None) -> None:
    found = demand("vllm", folder, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert (list(found.gpus), found.gpu_share, found.sets_cache) == ([0, 1, 2, 3], 0.9, False)
    assert found.device.weights == PARAMETERS * 2 // 4
    assert found.device.cache.least == 8192 * TOKEN // 4
    assert found.host.weights == 0


def test_tensorrt_llm_is_told_what_its_weights_leave(folder: Path, gpus: None) -> None:
    found = demand("tensorrt_llm", folder)
    assert (list(found.gpus), found.gpu_share, found.sets_cache) == ([0], 0.9, True)
    assert found.device.cache.share == 1.0


@pytest.mark.parametrize(("device", "places"), [("auto", [0]), ("cuda", [0]), ("cuda:3", [3]), ("cpu", [])])
def test_torch_on_the_gpu_that_it_is_given(folder: Path, gpus: None, device: str, places: list[int]) -> None:
    found = demand("torch", folder, device=device)
    assert (list(found.gpus), found.gpu_share) == (places, None)
    assert bool(found.device.weights) == bool(places)


def test_vllm_on_cpus_has_a_cache_in_each_worker(folder: Path) -> None:
    found = demand("vllm", folder, tensor_parallel_size=2, num_blocks=10)
    assert (found.host.cache.fixed, found.workers) == (10 * 32 * TOKEN, 2)
    assert demand("vllm", folder, tensor_parallel_size=2, kv_cache_memory="1GiB").host.cache.fixed == 2 * GIB


def test_the_simulated_engine_needs_next_to_nothing() -> None:
    found = estimate(EngineSpec(runner="simulated", options={"num_blocks": 10_000_000}))
    assert found == Demand(host=found.host)
    assert found.host.rest < 64 << 20


QWEN3_5_0_8B = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CONVOLVED, SUMMED = 18 * 6144 * 4, 18 * 16 * 128 * 128


def test_the_draft_head_of_a_hybrid_counts(folder: Path) -> None:
    """Six of its layers keep keys and values, as that of the head does."""
    (folder / "config.json").write_text(json.dumps({"text_config": QWEN3_5_0_8B}))
    plain, beside = (demand("openvino", folder, num_blocks=48, mtp=mtp).host.cache.fixed for mtp in (False, True))
    assert plain is not None
    assert beside == plain + 48 * 32 * (2 * 2 * 256 * 2 + 2 * QWEN3_5_0_8B["hidden_size"])


@pytest.mark.parametrize(("runner", "summed"), [("torch", 4), ("openvino", 2)])
def test_states_count_beside_keys_and_values(folder: Path, runner: str, summed: int) -> None:
    """Of each token a part of the checkpoint behind it; 8 seats and two steps have rows of their own."""
    (folder / "config.json").write_text(json.dumps({"text_config": QWEN3_5_0_8B}))
    token, row = 6 * 2 * 2 * 256 * 2, CONVOLVED * 2 + SUMMED * summed
    options = {"kv_cache_dtype": "bf16", "state_interval": 512, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
    assert context_bytes(engine(runner, folder, **options)) == pytest.approx(token + row / 512)
    cache = demand(runner, folder, **options, num_blocks=48).host.cache
    assert cache.fixed == pytest.approx(48 * 32 * (token + row / 512) + (2 * 8 + 2 * (2 + 2) + 16) * row)
    assert demand(runner, folder, **options, kv_cache_memory="1GiB").host.cache == CacheWish(fixed=GIB)
    wish = demand(runner, folder, **options, max_model_len=32).host.cache
    assert wish.least == pytest.approx(32 * (token + row / 512) + (2 + 2 * (2 + 2) + 4) * row)


GEMMA4_E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
}
_FEWER = {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_key_value_heads": 8}

_OF_LAYERS = {"0": {"head_dim": 128}, **{str(n): {"head_dim": 512} for n in range(4, 35, 5)}}


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, 12 * 256 + 3 * 512),
        ({"num_kv_shared_layers": 0}, 28 * 256 + 7 * 512),
        (_FEWER, 12 * 8 * 256 + 3 * 4 * 512),
        (_FEWER | {"attention_k_eq_v": False}, 12 * 8 * 256 + 3 * 8 * 512),
        ({"per_layer_config": _OF_LAYERS}, 128 + 11 * 256 + 3 * 512),
        ({"global_head_dim": None, "intermediate_size": [6144] * 35}, 15 * 256),
    ],
)
def test_layers_of_gemma_keep_as_much_as_their_own_heads(folder: Path, changes: dict[str, Any], values: int) -> None:
    """The last layers read what earlier ones keep. The openvino engine's graph has the same sizes."""
    config = {**GEMMA4_E2B, **changes}
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    assert context_bytes(engine("torch", folder)) == 2 * values * 2
    name = "Gemma4ForCausalLM" if config["global_head_dim"] else "Gemma3nForCausalLM"
    layers = parse_config({"architectures": [name], **config}).attention.values()
    assert sum(layer.kv_size for layer in layers if layer.shares is None) == values


@pytest.mark.parametrize(
    ("config", "attending", "recurrent"),
    [
        ({"hybrid_override_pattern": "M-M*-ME"}, 1, 3),
        ({"attn_layer_indices": [1]}, 1, 2),
        ({"full_attn_idxs": [0, 2]}, 2, 1),
        ({"full_attention_interval": 2}, 1, 2),
        ({"model_type": "falcon_h1"}, 3, 3),
    ],
)
def test_which_layers_keep_states(config: dict[str, Any], attending: int, recurrent: int) -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4}
    shape = read_states({"num_hidden_layers": 3, **sizes, **config})
    assert shape == StateShape(attending, recurrent * (32 + 32) * 4, recurrent * 4 * 8 * 16)
    assert read_states({"num_hidden_layers": 3, **config}) is None
    assert read_states({"num_hidden_layers": 3, **sizes}) is None


def test_a_hybrid_s_own_ways_to_give_its_sizes(folder: Path) -> None:
    """Nemotron-H says how many layers there are by their kinds alone; sizes of heads may be left to the model."""
    nemotron = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4}
    config = {**nemotron, "layers_block_type": ["linear_attention", "mlp", "full_attention"], "vocab_size": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    shape = read_shape(folder)
    assert shape is not None
    assert shape.layers == 3
    older = {**config, **sizes, "mamba_n_groups": 2, "mamba_d_conv": 3}  # these go first
    assert read_states(older) == StateShape(1, (4 * 8 + 2 * 2 * 16) * 3, 4 * 8 * 16)
    heads = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
    falcon = {"model_type": "falcon_h1", "num_hidden_layers": 3, "hidden_size": 32, "mamba_expand": 2}
    assert read_states({**falcon, **heads, "mamba_d_ssm": 32}) == StateShape(3, 3 * 64 * 4, 3 * 4 * 8 * 16)
    assert read_states({**falcon, **heads, "mamba_d_ssm": None}) == StateShape(3, 3 * 96 * 4, 3 * 4 * 16 * 16)
