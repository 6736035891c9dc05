"""`penstock deploy ray CONFIG`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from penstock.engines.errors import EngineError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.ray_serve.deployment_file import Deployment, read_deployment

_NOT_INSTALLED = "deploy ray: needs Ray, which is not installed: pip install 'penstock-server[ray]'"


def add_deploy_command(commands: Any, formatter: Any) -> None:
    deploy = commands.add_parser("deploy", help="run replicas of a server on a cluster", formatter_class=formatter)
    kinds = deploy.add_subparsers(required=True, metavar="CLUSTER")
    parser = kinds.add_parser(
        "ray",
        help="with Ray Serve",
        description="Deploys the server that CONFIG describes, a file as for `penstock serve` with a table `ray`, as "
        "an application of Ray Serve. A second deployment under the same name replaces the running one, replica by "
        "replica.",
        formatter_class=formatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML or YAML file")
    parser.add_argument(
        "--serve-config",
        action="store_true",
        help="write the configuration for `serve deploy` to standard output instead, and what `ray start` needs",
    )
    parser.set_defaults(run_command=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, arguments: dict[str, Any]) -> int:
    try:
        deployment = read_deployment(arguments["config"])
        if arguments["serve_config"]:
            sys.stdout.write(serve_config(deployment))
            return 0
        return _deploy(deployment)
    except ConfigError as error:
        parser.error(str(error))


def _deploy(deployment: Deployment) -> int:
    try:
        from penstock.gateway.ray_serve.cluster import deploy
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(_NOT_INSTALLED) from None
    try:
        url = deploy(deployment)
    except EngineError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(f"{deployment.ray.name} is running: {url}")
    return 0


def serve_config(deployment: Deployment) -> str:
    """For `serve deploy`, with the environment that it needs as comments."""
    from penstock.gateway.ray_serve.grpc_service import ADDS_SERVICE
    from penstock.gateway.ray_serve.proxy import ENVIRONMENT

    ray = deployment.ray
    tables: dict[str, Any] = {
        "proxy_location": ray.proxies,
        "http_options": {"host": ray.host, "port": ray.http_port},
        "applications": [
            {
                "name": ray.name,
                "route_prefix": ray.route_prefix,
                "import_path": "penstock.gateway.ray_serve.application:app",
                "args": deployment.tables(),
            }
        ],
    }
    if ray.grpc:
        tables["grpc_options"] = {"port": ray.grpc_port, "grpc_servicer_functions": [ADDS_SERVICE]}
    environment = "".join(f"#   export {name}={value}\n" for name, value in ENVIRONMENT.items())
    return f"# Before `ray start`, on every node:\n{environment}" + yaml.safe_dump(tables, sort_keys=False)
