"""Deploying to a Ray cluster that runs."""

from __future__ import annotations

import logging

import ray
from ray import serve
from ray.serve.config import ControllerOptions, HTTPOptions, gRPCOptions

from penstock.engines.errors import EngineError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.ray_serve.application import build_application
from penstock.gateway.ray_serve.deployment_file import Deployment
from penstock.gateway.ray_serve.grpc_service import ADDS_SERVICE
from penstock.gateway.ray_serve.proxy import ENVIRONMENT
from penstock.gateway.requests.addresses import url_host
from penstock.gateway.requests.first_steps import reachable_host

logger = logging.getLogger("penstock")


def deploy(deployment: Deployment) -> str:
    """Starts Serve where it does not run yet, and the application. Returns its URL when it serves. Raises
    ConfigError, EngineError."""
    settings = deployment.ray
    try:
        ray.init(settings.address or "auto", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError:
        where = settings.address or "on this machine (RAY_ADDRESS, or `address` in the table `ray`, names another)"
        raise ConfigError(f"ray: there is no Ray cluster {where}; `ray start --head` starts one") from None
    _warn_of_running_proxies()
    serve.start(
        proxy_location=settings.proxies,
        http_options=HTTPOptions(host=settings.host, port=settings.http_port),
        grpc_options=gRPCOptions(
            port=settings.grpc_port, grpc_servicer_functions=[ADDS_SERVICE] if settings.grpc else []
        ),
        controller_options=ControllerOptions(runtime_env={"env_vars": ENVIRONMENT}),
    )
    try:
        serve.run(build_application(deployment), name=settings.name, route_prefix=settings.route_prefix)
    except RuntimeError as error:  # with the end of a replica's log
        raise EngineError(f"the application did not start: {error}") from None
    return f"http://{url_host(reachable_host(settings.host))}:{settings.http_port}{settings.route_prefix}"


def _warn_of_running_proxies() -> None:
    """Their environment is that of Serve's first start, and nobody can ask for it."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    needed = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    logger.warning(
        "Ray Serve runs already, so its ports stay as they are. Unless Penstock has started it, or Ray was started "
        "with %s, its proxies do not route by prefix, and do not end the streams of a replica that dies",
        needed,
    )
