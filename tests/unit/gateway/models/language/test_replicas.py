"""From settings to several engines of a model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from penstock.engines.door.spec import DoorSpec
from penstock.engines.host.placement import Placement
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.engine import ReplicatedEngine
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import find_model
from penstock.gateway.models.language.replicas import replica_specs
from penstock.gateway.models.memory.budget import CacheWish, Demand, MemoryNeeds
from penstock.gateway.models.memory.budgeted_engine import BudgetedEngine

DEMO = find_model(None)


ROLES = {"replicas": 2, "prefill_replicas": 1}


def engine_of(**settings: Any) -> Any:
    return ModelBuilder().build(load_config({"engine": "simulated"} | settings, environ={}).models, DEMO).engine


def test_one_replica_is_an_engine_like_any() -> None:
    assert isinstance(engine_of(), BudgetedEngine)
    assert isinstance(engine_of(resume="off"), BudgetedEngine)
    assert isinstance(engine_of(resume="on"), ReplicatedEngine), "its streams wait for its restart"


def test_replicas_are_not_loaded_where_there_are_none() -> None:
    code = """
import sys
from penstock.gateway.configuration.config import load_config
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import find_model
ModelBuilder().build(load_config({"engine": "simulated"}, environ={}).models, find_model(None))
loaded = {"penstock.engines.replicas.engine", "penstock.engines.replicas.routing"}
loaded |= {"penstock.gateway.models.language.replicas"}
loaded |= {"penstock.engines.handover.memory", "penstock.engines.handover.shared_blocks"}
sys.exit(bool(loaded & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_replicas_are_engines_of_one_model() -> None:
    engine = engine_of(replicas=3)
    assert isinstance(engine, ReplicatedEngine)
    assert len(engine.replicas) == 3
    assert all(isinstance(replica.engine, BudgetedEngine) for replica in engine.replicas)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm", "replicas": 2}, "replicas: the vllm engine divides devices by itself"),
        ({"engine": "tensorrt_llm", "replicas": 2}, "replicas: the tensorrt_llm engine divides devices by itself"),
        ({"engine": "torch", "replicas": 2, "device": "cuda:1"}, "replicas: each takes a GPU of its own, so device"),
        ({"replicas": 0}, "replicas: 0 needs a replica-address"),
        ({"replicas": 0, "replica_address": ["ipc:///x/d"]}, "engine: with replicas=0, this is set where"),
        ({"replica_address": ["tcp://host:1"]}, "replica-address: over tcp an engine needs an engine-key"),
        ({"replica_address": ["ipc:///x/d"], "lora_directory": "/"}, "replica-address: engines elsewhere do not have"),
        ({"engine": "auto", "engine_address": "ipc:///x/d", "replicas": 2}, "replicas: with engine-address there is"),
        ({"scheduler": "engine", "resume": "on"}, "resume: an engine that uses its own scheduler"),
        (
            {"kv_events": "tcp://127.0.0.1:5557", "replica_address": ["ipc:///x/d"]},
            "kv-events: engines elsewhere publish theirs",
        ),
        (
            {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5558", "replicas": 2},
            "kv-events-replay: 2 replicas need it 2 ports or more",
        ),
        ({"kv_events": "tcp://127.0.0.1:65535", "replicas": 2}, "kv-events: 'tcp://127.0.0.1:65536'"),
        ({"prefill_replicas": 1}, "prefill-replicas: 1 of 1 replicas leave none that generates"),
        ({"handover_bytes": 5}, "handover-bytes: nothing is handed over without prefill-replicas"),
        ({"handover_min_tokens": 5}, "handover-min-tokens: nothing is handed over without prefill-replicas"),
        (ROLES | {"replicas": 0, "engine": "auto", "replica_address": ["ipc:///x/d"]}, "prefill-replicas: .* machine"),
        (ROLES | {"replica_address": ["ipc:///x/d"]}, "prefill-replicas: blocks are handed over on one machine"),
        (
            ROLES | {"engine": "torch"},
            "prefill-replicas: only the openvino engine, and vllm on CPUs, .* not torch",
        ),
        (ROLES | {"scheduler": "engine"}, "prefill-replicas: does not apply to an engine that uses its own scheduler"),
        (ROLES | {"resume": "off"}, "prefill-replicas: .* resume cannot be off"),
        (ROLES | {"prefix_caching": False}, "prefill-replicas: .* prefix-caching must be on"),
        (ROLES | {"kv_offload_dir": "/tmp"}, "prefill-replicas: blocks come from shared memory or from kv-offload-dir"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(**settings)


def test_vllm_has_replicas_where_it_computes_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("replicas", "engine_sharing"):
        monkeypatch.setattr(f"penstock.gateway.models.language.{module}.is_cpu_build", lambda: True)
    engine = engine_of(**ROLES, engine="vllm")
    assert isinstance(engine, ReplicatedEngine)
    assert engine.has_roles
    assert len(engine.replicas) == 2
    with pytest.raises(ConfigError, match="replicas: the vllm engine divides devices by itself"):
        engine_of(replicas=2, engine="vllm", tensor_parallel_size=2)


def test_the_first_ones_compute_prompts() -> None:
    engine = engine_of(replicas=3, prefill_replicas=2, handover_bytes=1000)
    told = [replica.engine._spec.scheduler.handover for replica in engine.replicas]
    assert [each.own for each in told] == [0, 1, None]
    assert {each.region_bytes for each in told} == {500}
    assert len({(each.key, each.regions) for each in told}) == 1, "they share what they tell"
    assert [state.role for state in engine.replica_states()] == ["prefill", "prefill", "decode"]


def spec(runner: str = "openvino", **options: Any) -> EngineSpec:
    tier = SchedulerConfig(kv_offload_dir="/there", kv_offload_bytes=900)
    return EngineSpec(runner=runner, options={"threads": None, "device": "auto"} | options, scheduler=tier)


def test_each_has_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {100_000, 100_001, 100_002}, raising=False)
    found = replica_specs(spec(), 3, on_gpus=False)
    assert [each.placement.cpus for each in found] == ["100000", "100001", "100002"]
    assert [each.scheduler.kv_offload_dir for each in found] == [f"/there/replica-{n}" for n in range(3)]
    assert {each.scheduler.kv_offload_bytes for each in found} == {300}
    told = replica_specs(spec(threads=4), 2, on_gpus=False)
    assert {each.placement for each in told} == {Placement()}, "who names a number of threads divides by himself"


def test_each_has_a_door() -> None:
    tcp = msgspec.structs.replace(spec(), door=DoorSpec(address="tcp://0.0.0.0:9000", key="k"))
    assert [each.door.address for each in replica_specs(tcp, 2, on_gpus=False) if each.door] == [
        "tcp://0.0.0.0:9000",
        "tcp://0.0.0.0:9001",
    ]
    ipc = msgspec.structs.replace(spec(), door=DoorSpec(address="ipc:///run/door"))
    assert [each.door.address for each in replica_specs(ipc, 2, on_gpus=False) if each.door] == [
        "ipc:///run/door",
        "ipc:///run/door-1",
    ]


def test_each_publishes_kv_events_at_ports_of_its_own() -> None:
    events = KVEventsConfig(endpoint="tcp://127.0.0.1:5557", replay="tcp://[::1]:5567", topic="kv@h@m")
    given = msgspec.structs.replace(spec(), scheduler=SchedulerConfig(kv_events=events))
    found = [each.scheduler.kv_events for each in replica_specs(given, 3, on_gpus=False)]
    assert [(each.endpoint, each.replay, each.topic, each.rank) for each in found if each] == [
        ("tcp://127.0.0.1:5557", "tcp://[::1]:5567", "kv@h@m", 0),
        ("tcp://127.0.0.1:5558", "tcp://[::1]:5568", "kv@h@m", 1),
        ("tcp://127.0.0.1:5559", "tcp://[::1]:5569", "kv@h@m", 2),
    ]


def test_who_must_resume_says_so_to_engines_elsewhere() -> None:
    """What they can is known when they are reached."""
    for resume, required in (("on", True), ("auto", False)):
        engine = engine_of(engine="auto", replicas=0, replica_address=["ipc:///x/d"], resume=resume)
        assert engine._settings.resume_required == required


def test_each_has_a_gpu() -> None:
    found = replica_specs(spec("torch"), 2, on_gpus=True)
    assert [each.options["device"] for each in found] == ["cuda:0", "cuda:1"]
    assert {each.placement for each in found} == {Placement()}


def test_a_single_one_is_as_it_was() -> None:
    assert replica_specs(spec(), 1, on_gpus=False) == [spec()]


def test_shares_of_free_memory_are_divided() -> None:
    needs = MemoryNeeds(weights=7, cache=CacheWish(share=0.5, least=3), rest=2)
    demand = Demand(host=needs, device=needs)
    one = demand.of_one(2)
    assert one.host.cache.share == one.device.cache.share == 0.25
    assert (one.host.weights, one.host.cache.least, one.host.rest) == (7, 3, 2)
    assert demand.of_one(1) == demand
