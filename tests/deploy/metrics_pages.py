"""Names of metrics: those that rules and dashboards ask for, and those that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from deploy.places import DEPLOY, KUBERNETES, ROOT

_NAME = re.compile(r"\b(?:penstock|nv|process)_\w+")
_GPU = ROOT / "gateway/penstock/gateway/metrics/machine.py"


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(title of the panel, query), with the variables that Grafana fills in replaced by what matches all."""
    for file in sorted((DEPLOY / "grafana/dashboards").glob("*.json")):
        dashboard = json.loads(file.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], _filled(target["expr"])
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                query = variable["query"]["query"]
                yield variable["label"], _filled(re.sub(r"^label_values\((.*), \w+\)$", r"\1", query))


def _filled(query: str) -> str:
    for name, value in (("$__rate_interval", "1m"), ("$instance", ".*"), ("$model", ".*")):
        query = query.replace(name, value)
    assert "$" not in query
    return query


def alert_rules() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def scaling_queries() -> Iterator[tuple[str, str]]:
    """What autoscalers look at."""
    scaled = yaml.safe_load((KUBERNETES / "components/keda/scaled-object.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield "KEDA", trigger["metadata"]["query"].replace('namespace="penstock"', "")
    autoscaler = yaml.safe_load((KUBERNETES / "components/hpa/autoscaler.yaml").read_text())
    for metric in autoscaler["spec"]["metrics"]:
        yield "HPA", metric["pods"]["metric"]["name"]
    for rule in yaml.safe_load((KUBERNETES / "components/hpa/adapter-rules.yaml").read_text())["rules"]:
        yield "adapter", rule["seriesQuery"].partition("{")[0]


def names(query: str) -> set[str]:
    """Of the metrics in a query."""
    without_labels = re.sub(r"\{[^}]*\}|\b(?:by|on)\s*\([^)]*\)", "", query)
    return set(_NAME.findall(without_labels))


def series_of(page: str) -> set[str]:
    """Names of the series on a page of metrics."""
    return {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if line and line[0] != "#"}


def needs_a_gpu(name: str) -> bool:
    return f'"{name}"' in _GPU.read_text()


def labels_of(page: str, metric: str) -> set[str]:
    [line, *_] = [line for line in page.splitlines() if line.startswith(metric + "{")] or [""]
    return set(re.findall(r'(\w+)="', line))
