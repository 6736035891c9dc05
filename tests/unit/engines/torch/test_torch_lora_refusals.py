"""Adapters that cannot be loaded beside a model, and models that have no room for them."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.contract.messages import LoadAdapter, UnloadAdapter
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.core import EngineCore
from penstock.engines.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from support.adapters import load_adapter
from support.engine import Driver
from support.models import ATTENTION_LAYERS, load_reference, make_adapter, merge_adapter, reference_tokens
from support.runner import prompt
from unit.engines.torch.families import make_family


@pytest.fixture(scope="module")
def adapter(llama_dir: Path, llama_reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), llama_reference)


def test_a_model_that_was_loaded_without(llama_dir: Path, adapter: Path, make_runner: Any) -> None:
    runner = make_runner(llama_dir)
    assert isinstance(runner, AdapterHost)
    with pytest.raises(UnsupportedError, match="loaded without LoRA: --lora and --lora-directory turn it on"):
        load_adapter(runner, "a:1", adapter)
    with pytest.raises(UnsupportedError, match=r"LoRA adapter a:1: .* loaded without LoRA"):
        make_runner(llama_dir, adapters={"a:1": adapter})
    runner.unload_adapter("a:1")


def test_slots_and_keys(llama_dir: Path, llama_reference: Any, adapter: Path, make_runner: Any) -> None:
    runner = make_runner(llama_dir, max_loras=2, adapters={"a:1": adapter})
    with pytest.raises(AlreadyExistsError):
        load_adapter(runner, "a:1", adapter)
    load_adapter(runner, "a:2", adapter)
    with pytest.raises(OverloadedError, match="All 2 slots for LoRA adapters are taken"):
        load_adapter(runner, "a:3", adapter)
    runner.unload_adapter("a:1")
    load_adapter(runner, "a:3", adapter)


def test_layers_that_the_model_lacks(llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any) -> None:
    """What is refused leaves nothing behind."""
    runner = make_runner(llama_dir, max_loras=1)
    config = llama_reference.config
    deeper = type(llama_reference)(type(config)(**config.to_dict() | {"num_hidden_layers": 4}))
    with pytest.raises(
        InvalidRequestError, match=r"no linear layer model\.layers\.3\.\S+ that an adapter could change"
    ):
        load_adapter(runner, "a:1", make_adapter(tmp_path / "deeper", deeper))
    wider = type(llama_reference)(type(config)(**config.to_dict() | {"intermediate_size": 100}))
    with pytest.raises(
        InvalidRequestError, match=r"down_proj has 100 inputs and 64 outputs, the model's has 96 and 64"
    ):
        load_adapter(runner, "a:2", make_adapter(tmp_path / "wider", wider))
    embedding = make_adapter(tmp_path / "embedding", llama_reference, targets=("embed_tokens",))
    with pytest.raises(InvalidRequestError, match=r"no linear layer model\.embed_tokens"):
        load_adapter(runner, "a:3", embedding)
    good = make_adapter(tmp_path / "good", llama_reference, targets=ATTENTION_LAYERS)
    load_adapter(runner, "a:4", good)
    driver = Driver(runner, max_num_seqs=8)
    [request] = driver.add(prompt(20, 1), 6, adapter="a:4")
    driver.run()
    merged = merge_adapter(load_reference(llama_dir), good)
    assert driver.tokens[request] == reference_tokens(merged, prompt(20, 1), 6)


def test_layers_that_do_not_see_all_tokens(tmp_path: Path, make_runner: Any) -> None:
    """Shared experts are ordinary layers, the router is none."""
    make_family(tmp_path, "deepseek_v3")
    reference = load_reference(tmp_path)
    runner = make_runner(tmp_path, max_loras=1)
    router = make_adapter(tmp_path / "router", reference, targets=("gate",))
    with pytest.raises(InvalidRequestError, match=r"no linear layer model\.layers\.1\.mlp\.gate that"):
        load_adapter(runner, "a:1", router)
    path = make_adapter(tmp_path / "shared", reference, targets=("gate_proj", "up_proj"))
    load_adapter(runner, "a:2", path)
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=13)
    tokens = [token % 300 for token in prompt(20, 2)]
    [request] = driver.add(tokens, 6, adapter="a:2")
    driver.run()
    assert driver.tokens[request] == reference_tokens(merge_adapter(reference, path), tokens, 6)


def test_ranks_and_numbers(llama_dir: Path, llama_reference: Any, tmp_path: Path, make_runner: Any) -> None:
    runner = make_runner(llama_dir, dtype="f16", max_loras=1, max_lora_rank=8)
    with pytest.raises(InvalidRequestError, match="rank of 9 is above max_lora_rank=8"):
        load_adapter(runner, "a:1", make_adapter(tmp_path / "rank", llama_reference, rank=9))
    with pytest.raises(InvalidRequestError, match="_proj is not finite in the model's precision"):
        load_adapter(runner, "a:2", make_adapter(tmp_path / "large", llama_reference, lora_alpha=1e9))
    with pytest.raises(UnsupportedError, match="DoRA"):
        load_adapter(runner, "a:3", make_adapter(tmp_path / "dora", llama_reference, use_dora=True))


def test_room_is_kept_for_adapters(llama_dir: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All linear layers: 3 x (4 of attention, 3 of the MLP) and the output layer; 4 bytes a number."""
    monkeypatch.setattr("penstock.engines.torch.runner.free_memory", lambda device: 40 << 20)
    block = 32 * 768
    attention, mlp = 64 + 64 + 2 * (64 + 32) + 64 + 64, 3 * (64 + 96)
    slots = 4 * 5 * 16 * (3 * (attention + mlp) + 64 + 384)
    counts = [
        make_runner(llama_dir, num_blocks=None, kv_cache_memory="100%", max_loras=n).info.num_blocks for n in (0, 5)
    ]
    assert counts == [(40 << 20) // block, ((40 << 20) - slots) // block]


def test_messages_of_the_gateway(llama_dir: Path, adapter: Path) -> None:
    """The registry's plain options, and the two verbs as they come over the wire."""
    options = {"model_dir": str(llama_dir), "dtype": "f32", "device": "cpu", "threads": 1, "num_blocks": 16}
    options |= {"max_num_seqs": 4, "adapters": {"a:1": str(adapter)}, "max_loras": 2, "max_lora_rank": 4}
    core = load_core(
        EngineSpec(runner="torch", options=options, scheduler=SchedulerConfig(max_num_seqs=4)), lambda: 0.0
    )
    assert isinstance(core, EngineCore)
    calls = [
        LoadAdapter(1, "a:2", str(adapter)),
        LoadAdapter(2, "a:3", str(adapter)),
        UnloadAdapter(3, "a:1"),
        LoadAdapter(4, "a:4", str(adapter / "nothing")),
        LoadAdapter(5, "a:5", str(adapter)),
    ]
    replies = []
    for call in calls:
        replies += core.step([call]).replies
        while replies[-1:] == [] or replies[-1].call != call.call:
            assert select.select(core.wakeups, [], [], 30)[0], "no reply comes"
            replies += core.step([]).replies
    errors = {reply.call: reply.error and reply.error.code for reply in replies}
    assert errors == {1: None, 2: "overloaded", 3: None, 4: "invalid_request", 5: None}
    assert str(adapter) not in replies[3].error.message
    core.close()
