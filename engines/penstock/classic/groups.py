"""Instance groups: how many copies of a model are loaded, and for which device."""

from __future__ import annotations

from penstock.classic.base import InstanceContext
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.engines.host.gpus import visible_gpus


def instance_contexts(config: ModelConfig) -> list[InstanceContext]:
    """The instances of the configuration, named as Triton names them; without groups one on the CPU.

    Raises ValueError for a group that cannot be had here.
    """
    return [context for _, context in grouped_instances(config)]


def grouped_instances(config: ModelConfig) -> list[tuple[ModelInstanceGroup, InstanceContext]]:
    """The same, each with its group."""
    groups = list(config.instance_group) or [ModelInstanceGroup(kind=ModelInstanceGroup.KIND_CPU)]
    found: list[tuple[ModelInstanceGroup, InstanceContext]] = []
    for index, group in enumerate(groups):
        name = group.name or f"{config.name}_{index}"
        kind, devices = _devices(group, name)
        numbered = [device for device in devices for _ in range(max(1, group.count))]
        found += (
            (group, InstanceContext(name=f"{name}_{number}", kind=kind, device_id=device))
            for number, device in enumerate(numbered)
        )
    return found


def _devices(group: ModelInstanceGroup, name: str) -> tuple[str, list[int]]:
    """The kind, and the devices on each of which `count` instances are loaded."""
    kind = ModelInstanceGroup.Kind.Name(group.kind)
    if kind in ("KIND_CPU", "KIND_MODEL"):
        if group.gpus:
            raise ValueError(f"instance group {name} has kind {kind} but specifies one or more GPUs")
        return kind.removeprefix("KIND_"), [0]
    present = visible_gpus()
    if kind == "KIND_AUTO" and not present:
        return "CPU", [0]
    if not present:
        raise ValueError(f"instance group {name} has kind KIND_GPU but no GPUs are available")
    wrong = [gpu for gpu in group.gpus if not 0 <= gpu < present]
    if wrong:
        raise ValueError(f"instance group {name} asks for GPU {wrong[0]}, this machine has {present}")
    return "GPU", list(group.gpus) or list(range(present))
