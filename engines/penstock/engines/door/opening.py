"""From what an engine process was told to its door."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engines.contract.messages import Heartbeat
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.door import Door
from penstock.engines.door.messages import Welcome
from penstock.engines.registry import EngineSpec, engine_fingerprint


def open_door(spec: EngineSpec, info: ModelInfo, heartbeat: Callable[[], Heartbeat]) -> Door:
    """`spec.door` is not None. Raises EngineError when nothing can listen at its address."""
    if spec.door is None:
        raise ValueError("this engine has no door")
    welcome = Welcome(
        info=info,
        fingerprint=engine_fingerprint(spec, info, spec.door.model),
        adapters=[],
        max_adapters=spec.options.get("max_loras", 0),
        policy=str(spec.scheduler.policy),
        most_unseen=2 * (spec.scheduler.max_queued_requests + spec.scheduler.max_num_seqs),
        max_message_bytes=spec.door.max_message_bytes,
        client_timeout=spec.door.client_timeout,
    )
    return Door(spec.door, welcome, spec.options.get("adapters") or {}, heartbeat)
