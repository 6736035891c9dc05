"""The application of Ray Serve: for `serve run penstock.gateway.ray_serve.application:app config=FILE`, as the
`import_path` of a Serve configuration, or as `app({...})` in a module of your own for `serve build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.ray_serve.deployment_file import Deployment, read_deployment
from penstock.gateway.ray_serve.replica import PenstockReplica
from penstock.gateway.ray_serve.settings import RaySettings

_DEPLOYMENT = "penstock"
_POLICY = "penstock.gateway.ray_serve.autoscaling:LoadPolicy"
_ROUTER = "penstock.gateway.ray_serve.request_router:PrefixRouter"
_ON_ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""A server never blocks its event loop, so a replica needs no second one: each change of threads delays the first
token."""
_TELL_READINESS_S = 2.0
_LOOK_BACK_S = 10.0
_UNLOADING_S = 10.0
"""That models get after the drain timeout."""


def app(args: dict[str, Any]) -> Application:
    """`args`: the tables of a configuration file, or `config` with the name of one. Raises ConfigError."""
    if "config" not in args:
        return build_application(read_deployment(args))
    if len(args) > 1:
        raise ConfigError("config: with the name of a file there are no settings beside it")
    return build_application(read_deployment(Path(args["config"])))


def build_application(deployment: Deployment) -> Application:
    ray = deployment.ray
    config = deployment.replica_config()
    options: dict[str, Any] = {
        "name": _DEPLOYMENT,
        "ray_actor_options": {
            "num_cpus": ray.cpus,
            "num_gpus": ray.gpus,
            "resources": ray.resources,
            "runtime_env": {"env_vars": _ON_ONE_THREAD},
        },
        "max_ongoing_requests": ray.max_ongoing_requests,
        "max_queued_requests": ray.max_queued_requests,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": config.server.drain_timeout + _UNLOADING_S,
        **_size(ray),
    }
    if ray.routing == "prefix":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=_ROUTER, request_routing_stats_period_s=_TELL_READINESS_S
        )
    if ray.placement_group is not None:
        options["placement_group_bundles"] = list(ray.placement_group.bundles)
        options["placement_group_strategy"] = ray.placement_group.strategy
    return serve.deployment(**options)(serve.ingress()(PenstockReplica)).bind(deployment.replica_settings())


def _size(ray: RaySettings) -> dict[str, Any]:
    scaling = ray.autoscaling
    if scaling is None:
        return {"num_replicas": ray.replicas or 1}
    targets = {name: getattr(scaling, name) for name in scaling.__struct_fields__ if name.startswith("target_")}
    bounds = {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            **bounds,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            metrics_interval_s=_LOOK_BACK_S / 5,
            look_back_period_s=_LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=_POLICY, policy_kwargs={**bounds, **targets}),
        )
    }
