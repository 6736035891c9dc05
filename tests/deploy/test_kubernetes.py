"""The manifests as kubectl renders them: the schemas of Kubernetes and of what extends it, and that their parts fit
together."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deploy.places import KUBERNETES, documents, is_ours, pods, program, run
from deploy.settings import REST_SECONDS, of_container, pause, seconds_to_end

FOLDERS = (
    "overlays/cpu",
    "overlays/nvidia",
    "overlays/keda",
    "overlays/inference-gateway",
    "kserve",
    "leader-worker-set",
)
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes whose pods can sleep before they end, and the newest that the validator knows."""
MADE_BY_HAND = {"Secret": {"penstock-keys", "llm-example-org-tls"}, "PersistentVolumeClaim": {"penstock-models"}}
"""What docs/deploy.md tells the reader to create."""
BY_PACKAGES = ("gateway.networking.k8s.io/v1", "keda.sh/v1alpha1")

Resource = dict[str, Any]


@cache
def rendered(folder: str) -> list[Resource]:
    return documents(run(program("kubectl"), "kustomize", KUBERNETES / folder))


def named(folder: str, kind: str) -> dict[str, Resource]:
    return {each["metadata"]["name"]: each for each in rendered(folder) if each["kind"] == kind}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_resources_have_the_fields_of_their_schemas(folder: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    custom = pytest.importorskip("deploy.custom_resources")
    for resource in rendered(folder):
        api = resource["apiVersion"]
        for _, pod in pods(resource):
            as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
            validate.validate(as_pod, version, strict=True)
        if api in BY_PACKAGES or api.startswith("serving.kserve.io/") or custom.check_shape(resource):
            continue
        validate.validate(resource, version, strict=True)


def test_resources_of_kserve_have_only_its_fields() -> None:
    custom = pytest.importorskip("deploy.custom_resources")
    if find_spec("kserve") is None:
        pytest.skip("only .ci/deploy installs the package")
    found = [each for each in rendered("kserve") if each["kind"] in ("ServingRuntime", "InferenceService")]
    assert len(found) == 4
    for resource in found:
        assert custom.unknown_to_kserve(resource) == []
    wrong = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "spec": {"predictor": {"modell": {}}},
    }
    assert custom.unknown_to_kserve(wrong) == ["spec.predictor.modell"]


def test_resources_of_the_gateway_api_and_keda(tmp_path: Path) -> None:
    found = [each for folder in FOLDERS for each in rendered(folder) if each["apiVersion"] in BY_PACKAGES]
    assert {each["kind"] for each in found} == {"Gateway", "HTTPRoute", "ScaledObject"}
    modules = os.environ.get("DEPLOY_NODE_MODULES")
    if modules is None:
        pytest.skip("only .ci/deploy installs the packages")
    shutil.copy(Path(__file__).with_name("validate.mjs"), tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    run(program("node"), tmp_path / "validate.mjs", input=json.dumps(found))
    found[0]["spec"].clear()
    with pytest.raises(AssertionError):
        run(program("node"), tmp_path / "validate.mjs", input=json.dumps(found))


@pytest.mark.parametrize("folder", FOLDERS)
def test_servers_know_their_settings_and_have_the_time_to_drain(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: each["data"] for name, each in named(folder, "ConfigMap").items()}
    servers = 0
    for resource in rendered(folder):
        for _, pod in pods(resource):
            for container in filter(is_ours, pod["containers"]):
                servers += 1
                config = of_container(container, pod, files, tmp_path, monkeypatch)
                if "terminationGracePeriodSeconds" in pod:
                    assert pod["terminationGracePeriodSeconds"] >= pause(container) + seconds_to_end(config)
    assert servers >= 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_named_is_there(folder: str) -> None:
    def known(kind: str, name: str) -> bool:
        return name in named(folder, kind) or name in MADE_BY_HAND.get(kind, ())

    for resource in rendered(folder):
        for _, pod in pods(resource):
            for volume in pod.get("volumes", ()):
                if "configMap" in volume:
                    assert known("ConfigMap", volume["configMap"]["name"])
                if "persistentVolumeClaim" in volume:
                    assert known("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            for container in pod["containers"]:
                for variable in container.get("env", ()):
                    secret = variable.get("valueFrom", {}).get("secretKeyRef")
                    assert secret is None or known("Secret", secret["name"])
                ports = {port.get("name") for port in container.get("ports", ())}
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    place = container.get(probe, {}).get("httpGet", {}).get("port")
                    assert not isinstance(place, str) or place in ports
            if "serviceAccountName" in pod:
                assert known("ServiceAccount", pod["serviceAccountName"])
        spec = resource.get("spec", {})
        if "scaleTargetRef" in spec:
            assert known("Deployment", spec["scaleTargetRef"]["name"])
            assert "replicas" not in named(folder, "Deployment")[spec["scaleTargetRef"]["name"]]["spec"]
        for rule in spec.get("rules", ()) if resource["kind"] == "HTTPRoute" else ():
            for backend in rule["backendRefs"]:
                assert known(backend.get("kind", "Service"), backend["name"])
        if resource["kind"] == "InferencePool":
            picker = named(folder, "Service")[spec["endpointPickerRef"]["name"]]
            assert spec["endpointPickerRef"]["port"]["number"] in {port["port"] for port in picker["spec"]["ports"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_selectors_choose_the_pods_that_they_mean(folder: str) -> None:
    labels = {
        name: template["metadata"]["labels"]
        for each in rendered(folder)
        for name, template in _labelled_templates(each)
    }
    for resource in rendered(folder):
        kind, spec = resource["kind"], resource.get("spec", {})
        selector = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
            "InferencePool": spec.get("selector", {}).get("matchLabels"),
        }.get(kind)
        if selector is not None:
            chosen = {name for name, own in labels.items() if selector.items() <= own.items()}
            assert chosen == {resource["metadata"]["name"]}, f"{kind} {resource['metadata']['name']}"
        elif kind in ("PodDisruptionBudget", "NetworkPolicy", "InferencePool"):
            pytest.fail(f"{kind} chooses all pods, or none")


def _labelled_templates(resource: Resource) -> list[tuple[str, Resource]]:
    name, spec = resource["metadata"]["name"], resource.get("spec", {})
    if resource["kind"] == "Deployment":
        return [(name, spec["template"])]
    if resource["kind"] == "LeaderWorkerSet":
        return [(name, spec["leaderWorkerTemplate"]["leaderTemplate"])]
    return []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_pod_may_do_more_than_it_needs(folder: str) -> None:
    for resource in rendered(folder):
        for _, pod in pods(resource):
            for container in pod["containers"]:
                own = container["securityContext"]
                context = pod.get("securityContext", {}) | own
                assert context["runAsNonRoot"]
                assert own["readOnlyRootFilesystem"]
                assert not own["allowPrivilegeEscalation"]
                assert own["capabilities"] == {"drop": ["ALL"]}


def test_workers_outlive_their_leader_s_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = named("leader-worker-set", "LeaderWorkerSet").values()
    files = {name: each["data"] for name, each in named("leader-worker-set", "ConfigMap").items()}
    (_, leader), (_, worker) = pods(group)
    config = of_container(leader["containers"][0], leader, files, tmp_path, monkeypatch)
    assert pause(worker["containers"][0]) >= seconds_to_end(config) - REST_SECONDS
    assert worker["terminationGracePeriodSeconds"] > pause(worker["containers"][0])
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    gpus = int(leader["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    engine = config.models.engine
    assert engine.tensor_parallel_size * engine.pipeline_parallel_size == size * gpus
    assert json.loads(str(engine.engine_args)) == {"distributed_executor_backend": "ray"}
