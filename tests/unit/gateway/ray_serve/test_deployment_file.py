"""The table `ray` of a configuration, and what cannot be behind Ray Serve."""

from __future__ import annotations

import sys

import pytest
import yaml

from penstock.gateway import cli
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.ray_serve.deploy_command import serve_config
from penstock.gateway.ray_serve.deployment_file import Deployment, read_deployment
from penstock.gateway.ray_serve.settings import Autoscaling


def deployment(ray: dict | None = None, **settings: object) -> Deployment:
    return read_deployment({"engine": "simulated", **settings, "ray": ray or {}}, environ={})


def test_settings_stand_in_sections_or_at_the_top_beside_the_table(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("scheduling: {max_num_seqs: 8}\nengine: simulated\nray: {replicas: 2, cpus: 3.5}\n")
    found = read_deployment(file, environ={"PENSTOCK_SIM_STEP_MS": "5"})
    assert found.ray.replicas == 2
    config = found.replica_config()
    assert (
        config.models.scheduling.max_num_seqs,
        config.models.simulated.sim_step_ms,
        config.models.model.threads,
    ) == (8, 5.0, 3)


def test_a_replica_opens_no_port_and_keeps_nothing():
    server = deployment().replica_config().server
    assert {server.allow_http, server.allow_grpc, server.allow_metrics} == {False}
    assert server.stored_responses == server.background_responses == 0


def test_files_are_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    found = deployment(model="folder", model_repository=["folder", "s3://bucket/models"])
    assert found.settings["model"] == str(tmp_path / "folder")
    assert found.settings["model_repository"] == [str(tmp_path / "folder"), "s3://bucket/models"]
    assert deployment(model="org/model").settings["model"] == "org/model"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"http_port": 9}, "http_port: Ray Serve's proxies listen"),
        ({"data_dir": "x"}, "data_dir: each replica would have its own"),
        ({"grpc_use_ssl": True}, "TLS is set up in Ray Serve"),
        ({"no_such": 1}, "no setting called 'no_such'"),
        ({"engine": "abacus"}, "engine: "),
        ({"ray": {"replicas": 0}}, "ray: replicas: "),
        ({"ray": {"replica": 1}}, "replica"),
        ({"ray": {"replicas": 2, "autoscaling": {}}}, "exclude each other"),
        ({"ray": {"autoscaling": {"min_replicas": 5}}}, "min_replicas, 5, is above max_replicas, 4"),
        ({"ray": {"route_prefix": "llm"}}, "route_prefix"),
        ({"ray": {"cpus": 2, "placement_group": {"bundles": [{"CPU": 1}]}}}, "has 1 of CPU, and"),
        ({"ray": {"host": "0.0.0.0"}}, "other machines could use it without a key"),
        ({"ray": "two replicas"}, "ray: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError) as caught:
        read_deployment({"engine": "simulated", **settings}, environ={})
    assert said in str(caught.value)


def test_without_ray_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "penstock.yaml").write_text("engine: simulated\n")
    with pytest.raises(SystemExit):
        cli.main(["deploy", "ray", str(tmp_path / "penstock.yaml")])
    assert "pip install 'penstock-server[ray]'" in capsys.readouterr().err


def test_keys_let_other_machines_in():
    server = deployment({"host": "0.0.0.0"}, api_key="k").replica_config().server
    assert (server.api_key, server.host) == (("k",), "0.0.0.0")


def test_the_configuration_for_serve_deploy_reads_back_as_the_same_deployment():
    ray = {"autoscaling": {"max_replicas": 3}, "grpc": True, "placement_group": {"bundles": [{"CPU": 1.0}]}}
    given = deployment(ray, max_num_seqs=4, api_key=["k"])
    tables = yaml.safe_load(serve_config(given))
    assert tables["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert tables["grpc_options"]["grpc_servicer_functions"]
    [application] = tables["applications"]
    again = read_deployment(application["args"], environ={})
    assert again == given
    assert again.ray.autoscaling == Autoscaling(max_replicas=3)
