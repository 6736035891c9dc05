"""Compose, Prometheus' rules and Grafana's dashboard. Their queries are asked of a real Prometheus that reads a real
server's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from deploy.metrics_pages import (
    alert_rules,
    dashboard_queries,
    labels_of,
    names,
    needs_a_gpu,
    scaling_queries,
    series_of,
)
from deploy.places import DEPLOY, program, run
from support.routers import running
from support.server import Server, free_port, serving

PROMETHEUS = DEPLOY / "prometheus"
BY_PROMETHEUS = {"instance", "job", "pod"}
"""Labels that it adds."""
OF_A_BUSY_MACHINE = {"PenstockLoopLate", "PenstockEngineSilent"}
"""Alerts that a moment without a free core brings near, but not to fire."""


def test_rules_and_their_tests() -> None:
    promtool = program("promtool")
    run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    run(promtool, "check", "rules", PROMETHEUS / "alerts.yml")
    run(promtool, "test", "rules", PROMETHEUS / "alerts_test.yml")


def test_every_alert_is_tested_to_fire() -> None:
    fired = {
        test["alertname"]
        for group in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
        for test in group["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert fired == {name for name, _ in alert_rules()}


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_files_follow_the_specification(files: list[str]) -> None:
    for file in files:
        run(program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose" / file)


def test_files_that_compose_mounts_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    ours = [name for name in mounted if name.startswith("..")]
    assert len(ours) == 3
    assert all((DEPLOY / "compose" / name).is_dir() for name in ours)
    build = services["penstock"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).is_file()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--engine", "simulated", "--served-model-name", "m") as running:
        body = {"model": "m", "prompt": "three words here", "max_tokens": 8}
        assert running.post("/v1/completions", body).status_code == 200
        assert running.post("/v1/completions", body | {"temperature": 99}).status_code == 400
        infer = {"text_input": "words", "max_tokens": 2}
        assert running.post("/v2/models/m/generate", infer).status_code == 200
        yield running


def test_metrics_that_are_asked_for_exist(server: Server) -> None:
    page = httpx.get(server.operator + "/metrics").text
    series, wrong = series_of(page), []
    for where, query in (*alert_rules(), *dashboard_queries(), *scaling_queries()):
        asked = names(query)
        wrong += [f"{where}: there is no {name}" for name in asked - series if not needs_a_gpu(name)]
        if not asked and not query.startswith("up{"):
            wrong.append(f"{where}: it asks for nothing")
        for name, chosen in re.findall(r"((?:penstock|nv)_\w+)\{([^}]*)\}", query):
            unknown = set(re.findall(r"(\w+)=", chosen)) - labels_of(page, name) - BY_PROMETHEUS
            if unknown and not needs_a_gpu(name):
                wrong.append(f"{where}: {name} has no label {unknown}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has read the server's metrics three times. It has our rules, and our settings but for the
    target and the pace."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    [scrape] = settings["scrape_configs"]
    [targets] = scrape["static_configs"]
    targets["targets"] = [server.operator.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    (folder / "alerts.yml").write_text((PROMETHEUS / "alerts.yml").read_text())
    address = f"127.0.0.1:{free_port()}"
    flags = (
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}",
        f"--web.listen-address={address}",
    )
    with running([program("prometheus"), *flags], folder / "log", lambda: scrapes(address) >= 3):
        yield address


def ask(address: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=20).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    return list(answer["data"]["result"])


def scrapes(address: str) -> int:
    if httpx.get(f"http://{address}/-/ready", timeout=20).status_code != 200:
        return 0
    return sum(int(each["value"][1]) for each in ask(address, 'count_over_time(up{job="penstock"}[1m])'))


def test_a_real_prometheus_answers_the_dashboard_s_queries(prometheus: str) -> None:
    empty = [(title, query) for title, query in dashboard_queries() if not ask(prometheus, query)]
    assert all(map(needs_a_gpu, (name for _, query in empty for name in names(query)))), empty


def test_no_alert_fires_for_a_server_that_is_well(prometheus: str) -> None:
    rules = httpx.get(f"http://{prometheus}/api/v1/rules", timeout=20).json()["data"]["groups"][0]["rules"]
    assert len(rules) == len(list(alert_rules()))
    for rule in rules:
        assert rule["health"] in ("ok", "unknown"), rule
        near = rule["state"] == "pending" and rule["name"] in OF_A_BUSY_MACHINE
        assert rule["state"] == "inactive" or near, rule


def test_the_dashboard_uses_the_data_source_that_is_provisioned() -> None:
    provisioning = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    dashboard = json.loads((DEPLOY / "grafana/dashboards/penstock.json").read_text())
    [variable] = [each for each in dashboard["templating"]["list"] if each["name"] == "datasource"]
    assert (variable["query"], variable["current"]["value"]) == (source["type"], source["uid"])
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    [provider] = yaml.safe_load((provisioning / "dashboards/penstock.yaml").read_text())["providers"]
    mounts = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]["grafana"]["volumes"]
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/penstock.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
