"""The table `ray` of a configuration file: how many replicas, what each takes, how requests find them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from penstock.gateway.configuration.config import ConfigError, explain
from penstock.gateway.configuration.plain_values import plain
from penstock.gateway.configuration.sections.types import Name, Port, Positive, Seconds

Share = Annotated[float, Meta(gt=0, le=1)]
Amount = Annotated[float, Meta(ge=0)]


class Autoscaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas follow the load. Each of the three targets asks for a number of replicas; the highest one counts."""

    min_replicas: Annotated[int, Meta(ge=0)] = 1
    """0: the last replica is stopped, too, and the next request waits until one has started."""
    max_replicas: Positive = 4
    target_waiting: Annotated[float, Meta(gt=0)] = 2.0
    """Requests that wait in a replica's queue."""
    target_running: Share = 0.8
    """Share of a replica's places for running requests (`max_num_seqs`)."""
    target_kv_usage: Share = 0.8
    """Share of its KV cache."""
    upscale_delay_s: Seconds = 10.0
    downscale_delay_s: Seconds = 300.0


class PlacementGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica reserves beside its actor. The actor lives in the first bundle."""

    bundles: Annotated[tuple[dict[str, Amount], ...], Meta(min_length=1)]
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class RaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: Name | None = None
    """Of the cluster; None: as RAY_ADDRESS says, or the one on this machine."""
    name: Name = "penstock"
    """Of the application."""
    route_prefix: Annotated[str, Meta(pattern=r"^/([^{}\s]*[^/{}\s])?$")] = "/"
    replicas: Positive | None = None
    """None: 1, or what `autoscaling` says."""
    autoscaling: Autoscaling | None = None
    cpus: Amount = 1.0
    """CPUs of a replica, for its actor and the engine process below it."""
    gpus: Amount = 0.0
    resources: dict[str, Amount] = {}
    """Other resources of the nodes."""
    placement_group: PlacementGroup | None = None
    max_ongoing_requests: Positive = 1024
    """In one replica, waiting ones included; more wait at the proxies."""
    max_queued_requests: Annotated[int, Meta(ge=-1)] = 1024
    """At each proxy; more get 503. -1: any number."""
    routing: Literal["prefix", "power_of_two"] = "prefix"
    """prefix: to where the beginning of the prompt, or the session, has been before; power_of_two: Serve's own."""
    proxies: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    """Nodes with a proxy; EveryNode: those that have a replica, and the head."""
    host: str = "127.0.0.1"
    """Where the proxies listen."""
    http_port: Port = 8000
    grpc: bool = False
    grpc_port: Port = 9000


def read_ray_settings(table: Any) -> RaySettings:
    """Raises ConfigError."""
    try:
        settings = msgspec.convert(plain(table, inspect.type_info(RaySettings)), RaySettings)
    except ValueError as error:  # msgspec's among them
        raise ConfigError(f"ray: {explain(str(error))}") from None
    scaling = settings.autoscaling
    if scaling is not None and settings.replicas is not None:
        raise ConfigError("ray: replicas and autoscaling exclude each other")
    if scaling is not None and scaling.min_replicas > scaling.max_replicas:
        raise ConfigError(f"ray: min_replicas, {scaling.min_replicas}, is above max_replicas, {scaling.max_replicas}")
    _check_placement(settings)
    return settings


def _check_placement(settings: RaySettings) -> None:
    """Ray puts the actor into the first bundle, and waits forever where it does not fit."""
    if settings.placement_group is None:
        return
    first = settings.placement_group.bundles[0]
    resources = {"CPU": settings.cpus, "GPU": settings.gpus, **settings.resources}
    for name, amount in resources.items():
        if first.get(name, 0.0) < amount:
            raise ConfigError(
                f"ray: the first bundle of placement_group has {first.get(name, 0.0):g} of {name}, and the replica's "
                f"actor in it needs {amount:g}"
            )
