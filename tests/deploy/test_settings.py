"""Every setting that deploy/ gives a server is one that it has, and servers get the time that their drain needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.places import DEPLOY, KUBERNETES, Pod, documents, is_ours, pods
from deploy.settings import IMAGE, REST_SECONDS, of_container, parsed, pause, seconds_to_end
from penstock.gateway.server import lifecycle

FILES = {
    "penstock": {"penstock.toml": (KUBERNETES / "base/penstock.toml").read_text()},
    "penstock-group": {"penstock.toml": (KUBERNETES / "leader-worker-set/penstock.toml").read_text()},
}


def servers() -> Iterator[Any]:
    for file in sorted(KUBERNETES.rglob("*.yaml")):
        for resource in documents(file.read_text()):
            if "kind" in resource and "metadata" in resource:
                for name, pod in pods(resource):
                    for container in pod.get("containers", ()):
                        if is_ours(container):
                            yield pytest.param(pod, container, id=f"{file.parent.name} {name}")


@pytest.mark.parametrize(("pod", "container"), list(servers()))
def test_of_pods(pod: Pod, container: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_container(container, pod, FILES, tmp_path, monkeypatch)
    if "terminationGracePeriodSeconds" in pod:
        assert pod["terminationGracePeriodSeconds"] >= pause(container) + seconds_to_end(config)


def test_kserve_gives_its_pods_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the runtime has the settings, and the service the time."""
    needed = {
        resource["metadata"]["name"]: seconds_to_end(of_container(container, pod, {}, tmp_path, monkeypatch))
        for resource in documents((KUBERNETES / "kserve/serving-runtimes.yaml").read_text())
        for _, pod in pods(resource)
        for container in pod["containers"]
    }
    for service in documents((KUBERNETES / "kserve/inference-services.yaml").read_text()):
        predictor = service["spec"]["predictor"]
        assert predictor["terminationGracePeriodSeconds"] >= needed[predictor["model"]["runtime"]]


def test_the_rest_behind_a_drain() -> None:
    assert lifecycle._STOP_SECONDS == REST_SECONDS


@pytest.mark.parametrize("model", ["penstock-demo", "/models/mine"])
def test_of_compose(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]["penstock"]
    given = {"PENSTOCK_API_KEY": "k", "PENSTOCK_MODEL": model}
    environ = {
        name: re.sub(r"\$\{(\w+):[-?].*?\}", lambda match: given.get(match[1], ""), value)
        for name, value in service["environment"].items()
    }
    config = parsed(service["command"], IMAGE | environ, monkeypatch)
    assert config.server.api_key == ("k",)
    assert config.models.model.model == model
    assert int(service["stop_grace_period"].removesuffix("s")) >= seconds_to_end(config)


def test_of_compose_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "compose/compose.cuda.yaml").read_text())["services"]["penstock"]
    assert parsed(["serve"], service["environment"], monkeypatch).models.model.engine == "vllm"


def test_of_the_systemd_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = (DEPLOY / "systemd/penstock.service").read_text()
    [command] = re.findall(r"^ExecStart=(.*)", unit, re.MULTILINE)
    program, *arguments = shlex.split(command.replace("/etc/penstock", str(DEPLOY / "systemd")))
    assert program.endswith("/penstock")
    config = parsed(arguments, {}, monkeypatch)
    assert config.data.data_dir == "/var/lib/penstock"


def test_images_do_not_start_open_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    dockerfile = (DEPLOY / "docker/Dockerfile").read_text()
    assert all(f"{name}={value}" in dockerfile for name, value in IMAGE.items())
    with pytest.raises(Exception, match="other machines could use it without a key"):
        parsed(["serve"], IMAGE, monkeypatch)
