from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from penstock.engines.host.cores import usable_cores
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import default_threads
from support.engine import Driver

HERE = Path()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("dtype", "fp32", "auto, bf16, f16, f32"),
        ("weights", "int3", "auto, bf16, f16, f32, int8, int4"),
        ("activations", "int4", "auto, int8, mixed, bf16, f16, f32"),
        ("kv_cache_dtype", "fp8", "auto, u8, u8-u4, u4, bf16, f16, f32"),
        ("device", "GPU", "CPU"),
        ("threads", 0, "positive"),
        ("num_blocks", -1, "positive"),
        ("max_model_len", 1.5, "positive"),
        ("kv_cache_memory", True, "positive"),
        ("max_num_seqs", 0, "positive"),
        ("max_num_batched_tokens", None, "positive"),
        ("max_loras", -1, "positive"),
        ("max_lora_rank", 0, "positive"),
    ],
)
def test_unknown_values_are_refused_by_name(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}.*{allowed}") as error:
        OpenVINOConfig(HERE, **{name: value})
    assert error.value.param == name


def test_no_adapters_are_no_reason(llama_dir: Path, make_runner: Any) -> None:
    """And a request that has one all the same is not answered by the base model."""
    driver = Driver(make_runner(llama_dir, adapters={}, max_loras=0, max_lora_rank=8), max_num_seqs=4)
    [lost], [fine] = driver.add([5, 6, 7], 3, adapter="a:1"), driver.add([5, 6, 7], 3)
    driver.run()
    assert driver.tokens[lost] == []
    assert driver.ends[lost].error.message == "the adapter 'a:1' is not loaded in this engine"
    assert len(driver.tokens[fine]) == 3


def test_cache_types_that_do_not_go_with_the_computation(llama_dir: Path, make_runner: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match="kv_cache_dtype=bf16 cannot be combined with dtype=f32; f32, f16, u8, u8-u4"
    ):
        make_runner(llama_dir, kv_cache_dtype="bf16")


def test_more_context_than_the_model_has(llama_dir: Path, make_runner: Any) -> None:
    with pytest.raises(ContextLengthError, match="513 is above the model's 512"):
        make_runner(llama_dir, max_model_len=513)


def test_no_room_for_one_block(llama_dir: Path, make_runner: Any) -> None:
    with pytest.raises(UnsupportedError, match="does not hold one block"):
        make_runner(llama_dir, num_blocks=None, kv_cache_memory=1000)


def test_the_runner_tells_its_sizes_and_number_types(llama_dir: Path, make_runner: Any) -> None:
    info = make_runner(llama_dir, max_model_len=100, num_blocks=None, max_num_seqs=3).info
    assert (info.vocab_size, info.max_model_len, info.block_size, info.eos_token_ids) == (384, 100, 32, (2,))
    # 3 requests of 4 blocks: more could never be used.
    assert info.num_blocks == 12
    assert info.runner == "openvino f32, weights as stored, kv f32, 1 threads"


def test_cache_sized_by_bytes(llama_dir: Path, make_runner: Any) -> None:
    block_bytes = 3 * 2 * 2 * 32 * 16 * 4  # layers, keys and values, heads, tokens, head size, f32
    info = make_runner(llama_dir, num_blocks=None, kv_cache_memory=10 * block_bytes + 5).info
    assert info.num_blocks == 10


@pytest.mark.parametrize(
    ("mebibytes", "cores", "threads"),
    [(10, 2, 1), (10, 16, 1), (63, 16, 1), (64, 16, 2), (1000, 2, 2), (1000, 1, 1), (1000, 16, 15), (200, 16, 6)],
)
def test_threads_by_model_size(mebibytes: int, cores: int, threads: int) -> None:
    assert default_threads(mebibytes << 20, cores) == threads


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_hyperthreads_are_not_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert usable_cores(tmp_path) == 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"system.slice/us.service/cpu.max": "200000 100000\n"}, 2),
        ({"system.slice/us.service/cpu.max": "max 100000\n", "system.slice/cpu.max": "400000 100000\n"}, 4),
        ({"system.slice/us.service/cpu.max": "500000 100000\n", "system.slice/cpu.max": "300000 100000\n"}, 3),
        ({"system.slice/other.service/cpu.max": "200000 100000\n"}, 6),
        ({"cpu/us/cpu.cfs_quota_us": "200000\n", "cpu/us/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_cpu_time_limits(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)
    write(tmp_path, "proc/self/cgroup", "5:memory:/elsewhere\n4:cpuacct,cpu:/us\n0::/system.slice/us.service\n")
    assert usable_cores(tmp_path) == cores
