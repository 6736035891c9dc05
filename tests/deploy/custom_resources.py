"""Shapes of custom resources whose schemas no package has: the fields that deploy/ uses, by the documentation of
InferencePool (Gateway API inference extension, v1), LeaderWorkerSet (v1), LLMInferenceService (KServe, v1alpha2).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema

Schema = dict[str, Any]


def _object(required: str = "", **fields: Any) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_PORT = _object("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
_LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
_POD: Schema = {"type": "object", "required": ["containers"]}
"""Checked as a pod elsewhere."""

_WORKLOAD: Schema = {"replicas": _COUNT, "template": _POD, "worker": _POD, "labels": _LABELS}
_LLM = _object(
    model=_object("uri", uri={"type": "string", "pattern": "^(hf|s3|pvc|oci)://"}, name=_TEXT),
    router=_object(gateway={"type": "object"}, route={"type": "object"}, scheduler={"type": "object"}),
    baseRefs={"type": "array", "items": _object("name", name=_TEXT)},
    **_WORKLOAD,
)

SHAPES: dict[tuple[str, str], Schema] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        "selector targetPorts endpointPickerRef",
        selector=_object("matchLabels", matchLabels=_LABELS),
        targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8},
        endpointPickerRef=_object("name port", name=_TEXT, port=_PORT, failureMode={"enum": ["FailOpen", "FailClose"]}),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _object(
        "leaderWorkerTemplate",
        replicas=_COUNT,
        leaderWorkerTemplate=_object(
            "workerTemplate size",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=_object("spec", metadata={"type": "object"}, spec=_POD),
            workerTemplate=_object("spec", metadata={"type": "object"}, spec=_POD),
        ),
    ),
    ("serving.kserve.io/v1alpha2", "LLMInferenceServiceConfig"): _LLM,
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"): _LLM | {"required": ["model"]},
}
"""Of `spec`."""


def check_shape(resource: dict[str, Any]) -> bool:
    """Raises jsonschema.ValidationError; False where the kind has no shape here."""
    shape = SHAPES.get((resource["apiVersion"], resource["kind"]))
    if shape is None:
        return False
    jsonschema.validate(resource["spec"], shape)
    return True


def unknown_to_kserve(resource: dict[str, Any]) -> list[str]:
    """Fields that the models of the `kserve` package do not have, by their paths. The package is not imported: it would
    need what KServe's own servers need."""
    version = resource["apiVersion"].rpartition("/")[2]
    kind = f"V{version[1:]}{resource['kind']}Spec"
    if _fields(kind) is None:
        raise LookupError(f"the package kserve has no {kind}")
    return list(_unknown(resource["spec"], kind, "spec"))


def _unknown(value: Any, kind: str, path: str) -> Iterator[str]:
    if kind.startswith("list["):
        for number, each in enumerate(value):
            yield from _unknown(each, kind[5:-1], f"{path}[{number}]")
        return
    fields = _fields(kind)
    if fields is None:  # a type of Kubernetes' own, or a plain one
        return
    for name, each in value.items():
        if name in fields:
            yield from _unknown(each, fields[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _fields(kind: str) -> dict[str, str] | None:
    """JSON name and type of each field; None for what is not KServe's."""
    package = find_spec("kserve")
    places = [] if package is None else package.submodule_search_locations or []
    for file in (file for place in places for file in (Path(place) / "models").glob("*.py")):
        source = file.read_text()
        if f"class {kind}(" in source:
            found = {
                node.targets[0].id: ast.literal_eval(node.value)
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id in ("openapi_types", "attribute_map")
            }
            return {found["attribute_map"][name]: kind for name, kind in found["openapi_types"].items()}
    return None
