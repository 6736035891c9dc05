"""Metadata, statistics and errors in Triton's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines import errors as tree
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.errors import kserve_error_body, kserve_grpc_status, kserve_status
from penstock.gateway.apis.kserve.http_models import counters, model_metadata, server_metadata, statistics
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.errors import HttpError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.requests.context import ANYONE
from support.kserve import FakeModelStore, add_sub, identity


def context(*, allow_shared_memory: bool = False, **options: Any) -> KServe:
    parts: Any = dict.fromkeys(("tracing", "logs"))
    regions = SharedMemoryRegions(allow_shared_memory)
    return KServe(names=Catalogue(), models=FakeModelStore(), shared_memory=regions, **parts, **options)


def test_the_server_names_the_extensions_that_it_has() -> None:
    found = server_metadata(context(name="mine", version="1.2"))
    assert (found["name"], found["version"]) == ("mine", "1.2")
    assert "binary_tensor_data" in found["extensions"]
    assert "cuda_shared_memory" not in found["extensions"]
    assert "system_shared_memory" not in found["extensions"]
    assert "system_shared_memory" in server_metadata(context(allow_shared_memory=True))["extensions"]


def test_a_model_without_batching_shows_its_dims() -> None:
    assert model_metadata(add_sub(), [1, 3]) == {
        "name": "add_sub",
        "versions": ["1", "3"],
        "platform": "python",
        "inputs": [{"name": f"INPUT{i}", "datatype": "FP32", "shape": [16]} for i in (0, 1)],
        "outputs": [{"name": f"OUTPUT{i}", "datatype": "FP32", "shape": [16]} for i in (0, 1)],
    }


def test_a_batching_model_has_a_variable_dimension_in_front() -> None:
    found = model_metadata(identity("BYTES", [4], max_batch_size=8), [1])
    assert found["inputs"] == [{"name": "INPUT0", "datatype": "BYTES", "shape": [-1, 4]}]
    service_pb2.ModelMetadataResponse(**found)


def test_statistics_fill_the_json_and_the_message() -> None:
    model = add_sub()
    model.statistics.executed(2, 10, 20, 30)
    model.statistics.succeeded(
        requests=2, inferences=2, total=100, queue=5, compute_input=10, compute_infer=20, compute_output=30
    )
    model.statistics.responses[0].success.add(7)
    found = counters(model)
    assert found["inference_stats"]["success"] == {"count": 2, "ns": 100}
    assert found["inference_stats"]["compute_infer"] == {"count": 2, "ns": 40}
    assert found["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 1, "ns": 10},
            "compute_infer": {"count": 1, "ns": 20},
            "compute_output": {"count": 1, "ns": 30},
        }
    ]
    message = service_pb2.ModelStatistics(**json.loads(json.dumps(found)))
    assert message.batch_stats[0].compute_infer.ns == 20
    assert message.response_stats["0"].success.count == 1
    assert message.inference_stats.queue.ns == 5


def test_statistics_are_of_all_models_of_one_or_of_a_version() -> None:
    store = FakeModelStore(add_sub(), add_sub(version=2), identity("FP32"))

    def versions(name: str = "", version: str = "") -> list[tuple[str, str]]:
        return [(each["name"], each["version"]) for each in statistics(store, ANYONE, name, version)["model_stats"]]

    assert versions() == [("add_sub", "1"), ("add_sub", "2"), ("identity_fp32", "1")]
    assert versions("add_sub") == [("add_sub", "1"), ("add_sub", "2")]
    assert versions("add_sub", "1") == [("add_sub", "1")]


@pytest.mark.parametrize("version", ["", "9"])
def test_statistics_of_an_unknown_model_are_a_bad_request(version: str) -> None:
    with pytest.raises(tree.InvalidRequestError, match="requested model 'zz' is not available"):
        statistics(FakeModelStore(add_sub()), ANYONE, "zz", version)


@pytest.mark.parametrize(
    ("error", "status", "grpc"),
    [
        (tree.InvalidRequestError("x"), 400, "INVALID_ARGUMENT"),
        (tree.ModelNotFoundError("x"), 404, "NOT_FOUND"),
        (tree.AlreadyExistsError("x"), 400, "ALREADY_EXISTS"),
        (tree.PayloadTooLargeError("x"), 413, "RESOURCE_EXHAUSTED"),
        (tree.UnsupportedError("x"), 501, "UNIMPLEMENTED"),
        (tree.AuthenticationError("x"), 401, "UNAUTHENTICATED"),
        (tree.QueueFullError("x"), 503, "UNAVAILABLE"),
        (tree.QueueTimeoutError("x"), 503, "UNAVAILABLE"),
        (tree.NotReadyError("x"), 503, "UNAVAILABLE"),
        (tree.DeadlineExceededError("x"), 504, "DEADLINE_EXCEEDED"),
        (tree.CancelledError("x"), 400, "CANCELLED"),
        (tree.UnknownError("x"), 400, "UNKNOWN"),
        (tree.EngineError("x"), 500, "INTERNAL"),
        (HttpError(415, "x"), 415, "INVALID_ARGUMENT"),
        (ValueError("secret"), 500, "INTERNAL"),
    ],
)
def test_errors_have_tritons_statuses(error: Exception, status: int, grpc: str) -> None:
    assert (kserve_status(error), kserve_grpc_status(error)) == (status, grpc)


def test_the_error_body_is_one_string() -> None:
    assert json.loads(kserve_error_body(tree.InvalidRequestError('a "b"'))) == {"error": 'a "b"'}
    assert b"secret" not in kserve_error_body(ValueError("secret"))
