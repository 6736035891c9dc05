"""Which requests are traced, what of them is written, and what clients may set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.kserve import tracing as tracing_module
from penstock.gateway.apis.kserve.trace_settings import TraceSettings
from penstock.gateway.apis.kserve.tracing import TraceFile, Tracing

ON = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}


def traced(tracing: Tracing, requests: int, model: str = "m") -> list[int]:
    """Which of so many requests are traced; their traces are finished."""
    found = []
    for index in range(requests):
        trace = tracing.start(model, 1)
        if trace is not None:
            trace.mark("REQUEST_START", index)
            trace.finish()
            found.append(index)
    return found


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_settings_at_the_start_are_tritons() -> None:
    tracing = Tracing("/traces/x.json")
    assert (
        tracing.settings()
        == tracing.settings("m")
        == {
            "trace_level": ["OFF"],
            "trace_rate": "1000",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_file": "/traces/x.json",
            "trace_mode": "triton",
        }
    )
    assert list(tracing.settings()) == [
        "trace_level",
        "trace_rate",
        "trace_count",
        "log_frequency",
        "trace_file",
        "trace_mode",
    ]
    assert not tracing.active
    assert tracing.start("m", 1) is None


def test_one_request_of_so_many() -> None:
    tracing = Tracing()
    tracing.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "3"})
    assert tracing.active
    assert traced(tracing, 10) == [2, 5, 8]


def test_so_many_traces_and_no_more() -> None:
    tracing = Tracing()
    tracing.update(ON | {"trace_count": "2"})
    assert tracing.settings()["trace_count"] == "2"
    assert traced(tracing, 5) == [0, 1]
    assert tracing.settings()["trace_count"] == "0"
    tracing.update({"trace_count": "1"})
    assert traced(tracing, 5) == [0]


def test_other_changes_do_not_count_again() -> None:
    tracing = Tracing()
    tracing.update(ON | {"trace_count": "3"}, "m")
    assert traced(tracing, 2, "m") == [0, 1]
    tracing.update({"log_frequency": "5"}, "m")
    tracing.update({"log_frequency": "6", "trace_level": ["OFF"]})
    assert tracing.settings("m")["trace_count"] == "1"
    assert traced(tracing, 5, "m") == [0]
    tracing.update({"trace_count": "2"}, "m")
    assert traced(tracing, 5, "m") == [0, 1]


def test_no_rate_no_trace() -> None:
    tracing = Tracing()
    tracing.update(ON | {"trace_rate": "0"})
    assert traced(tracing, 5) == []


def test_a_model_has_settings_of_its_own() -> None:
    tracing = Tracing()
    tracing.update({"trace_rate": "2", "trace_level": ["TIMESTAMPS"]}, "m")
    assert tracing.settings("m")["trace_level"] == ["TIMESTAMPS"]
    assert tracing.settings()["trace_level"] == ["OFF"]
    assert traced(tracing, 4, "m") == [1, 3]
    assert traced(tracing, 4, "other") == []
    tracing.update({"trace_rate": "1"})
    assert tracing.settings("m")["trace_rate"] == "2"


def test_what_a_model_does_not_set_follows_the_rest() -> None:
    tracing = Tracing()
    tracing.update({"trace_rate": "2"}, "m")
    tracing.update({"trace_level": ["TIMESTAMPS"], "log_frequency": "7"})
    assert tracing.settings("m") == tracing.settings() | {"trace_rate": "2"}
    assert traced(tracing, 4, "m") == [1, 3]


def test_null_clears() -> None:
    tracing = Tracing(settings=TraceSettings(trace_rate=50))
    tracing.update(ON)
    tracing.update({"trace_level": ["TENSORS"], "trace_rate": "7"}, "m")
    tracing.update({"trace_level": None, "trace_rate": []}, "m")
    assert tracing.settings("m") == tracing.settings()
    tracing.update({"trace_level": None, "trace_rate": None})
    assert tracing.settings() == Tracing(settings=TraceSettings(trace_rate=50)).settings()
    assert not tracing.active


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"trace_level": ["ALL"]}, "unknown trace level 'ALL'"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": [1]}, "must be a string"),
        ({"trace_level": {"a": 1}}, "must be a string"),
        ({"trace_rate": 5}, "must be a string"),
        ({"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": ""}, "Unable to parse 'trace_rate'"),
        ({"trace_rate": "٣"}, "Unable to parse 'trace_rate'"),
        ({"trace_rate": "-1"}, "out of range \\[ 0, 4294967295 \\], got: -1"),
        ({"trace_rate": "4294967296"}, "out of range"),
        ({"trace_rate": ["1", "2"]}, "one value"),
        ({"trace_count": "-2"}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": "2147483648"}, "out of range \\[ -1, "),
        ({"log_frequency": "9" * 5000}, "out of range"),
        ({"trace_mode": 1}, "must be a string"),
        ({"foo": "bar"}, "unknown trace setting 'foo'"),
    ],
)
def test_bad_values_change_nothing(values: dict[str, Any], text: str) -> None:
    tracing = Tracing()
    for model in ("", "m"):
        with pytest.raises(InvalidRequestError, match=text):
            tracing.update({"log_frequency": "3"} | values, model)
        assert tracing.settings(model) == Tracing().settings()


def test_what_is_not_offered_is_refused_by_name() -> None:
    for value in ("/tmp/x", None):
        with pytest.raises(UnsupportedError, match="trace file location can not be updated through network protocol"):
            Tracing().update({"trace_file": value})
    with pytest.raises(UnsupportedError, match="trace_mode 'opentelemetry' is not supported"):
        Tracing().update({"trace_mode": "opentelemetry"})
    Tracing().update({"trace_mode": "triton"})


def test_a_trace_is_written_as_triton_writes_it(tmp_path: Path) -> None:
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update(ON)
    request = InferRequest(inputs={"X": Tensor("X", "INT32", np.zeros(1, "<i4"))}, id="abc")
    trace = tracing.start("m", 3)
    assert trace is not None
    trace.mark("HTTP_RECV_START", 5)
    trace.inputs(request)
    assert request.trace is trace
    request.trace.mark("QUEUE_START", 7)
    trace.outputs([Tensor("Y", "INT32", np.zeros(1, "<i4"))])
    trace.finish()
    trace.finish()
    other = tracing.start("m", 3)
    assert other is not None
    other.finish()
    tracing.close()
    assert events(tmp_path / "t.json") == [
        {"id": 1, "model_name": "m", "model_version": 3, "request_id": "abc"},
        {"id": 1, "timestamps": [{"name": "HTTP_RECV_START", "ns": 5}]},
        {"id": 1, "timestamps": [{"name": "QUEUE_START", "ns": 7}]},
        {"id": 2, "model_name": "m", "model_version": 3},
    ]


def test_tensors_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update({"trace_level": ["TENSORS"], "trace_rate": "1"})
    trace = tracing.start("m", 1)
    assert trace is not None
    words = np.empty((1, 2), np.object_)
    words[0] = [b"tok", b"\xff"]
    inputs = {
        "A": Tensor("A", "FP32", np.array([[0.5, 2]], np.float32)),
        "B": Tensor("B", "BYTES", words),
        "C": Tensor("C", "BOOL", np.array([True, False])),
    }
    trace.inputs(InferRequest(inputs=inputs))
    trace.mark("QUEUE_START", 7)
    trace.outputs([Tensor("D", "BF16", np.array([1.5], ml_dtypes.bfloat16))])
    trace.finish()
    tracing.close()
    found = events(tmp_path / "t.json")[1:]
    assert [event["activity"] for event in found] == ["TENSOR_QUEUE_INPUT"] * 3 + ["TENSOR_BACKEND_OUTPUT"]
    assert [event["tensor"] for event in found] == [
        {"name": "A", "data": "0.5,2.0", "shape": "1,2", "dtype": "FP32"},
        {"name": "B", "data": '"tok","\ufffd"', "shape": "1,2", "dtype": "BYTES"},
        {"name": "C", "data": "1,0", "shape": "2", "dtype": "BOOL"},
        {"name": "D", "data": "1.5", "shape": "1", "dtype": "BF16"},
    ]


def test_so_many_traces_to_a_file(tmp_path: Path) -> None:
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update(ON | {"log_frequency": "2"})
    traced(tracing, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json.0", "t.json.1"]
    assert [event["id"] for event in events(tmp_path / "t.json.1") if "model_name" in event] == [3, 4]
    tracing.close()
    assert [event["id"] for event in events(tmp_path / "t.json") if "model_name" in event] == [5]


def test_a_request_and_those_made_for_it_are_one_trace(tmp_path: Path) -> None:
    """Report server#4059: `trace_summary.py` looks for all of a request in one file. Those of later ones are alone."""
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update(ON | {"log_frequency": "2"})
    ensemble = tracing.start("e", 1)
    assert ensemble is not None
    step, late = ensemble.child("m", 1), ensemble.child("n", 1)
    inner = step.child("k", 1)
    inner.finish()
    step.finish()
    assert not list(tmp_path.iterdir())
    ensemble.finish()
    later = late.child("k", 1)
    later.finish()
    traced(tracing, 1)
    late.finish()
    tracing.close()
    files = [events(tmp_path / name) for name in ("t.json.0", "t.json")]
    found = [[(event["id"], event.get("parent_id")) for event in file if "model_name" in event] for file in files]
    assert found == [[(1, None), (2, 1), (4, 2), (6, None)], [(3, 1), (5, 3)]]


def test_so_many_are_kept_for_their_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "_MAX_CHILDREN", 3)
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update(ON | {"log_frequency": "1"})
    outer = tracing.start("e", 1)
    assert outer is not None
    inner = outer.child("m", 1)
    for parent in (inner, outer, inner, outer):
        parent.child("k", 1).finish()
    assert len(list(tmp_path.iterdir())) == 2
    inner.finish()
    outer.finish()
    assert [event["id"] for event in events(tmp_path / "t.json.2") if "model_name" in event] == [1, 2, 3, 4]


def test_long_traces_are_written_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(str(path))
    event = b'{"id":"%s"}' % (b"x" * 10_000)
    sizes = []
    for _ in range(20):
        file.add([event], 0)
        if path.exists():
            sizes.append(len(events(path)))
    assert sizes == [7] * 7 + [14] * 7
    file.flush()
    assert len(events(path)) == 20


def test_a_file_of_an_earlier_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    file = TraceFile(str(path))
    file.add([b"1"], 0)
    file.flush()
    assert json.loads(path.read_text()) == [1]


def test_a_disk_that_cannot_be_written_costs_traces_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing(str(tmp_path / "nowhere" / "t.json"))
    tracing.update(ON | {"log_frequency": "1"})
    assert traced(tracing, 2) == [0, 1]
    assert "traces were lost" in caplog.text


def test_nothing_is_collected_without_a_file() -> None:
    file = TraceFile("")
    file.add([b"{}"], 0)
    file.add([b"{}"], 1)
    file.flush()
    assert vars(file)["_events"] == []


def test_a_file_is_written_before_too_much_is_collected(tmp_path: Path) -> None:
    """However many traces it should have."""
    file = TraceFile(str(tmp_path / "t"))
    event = b'{"data":"' + b"x" * (20 << 20) + b'"}'
    for _ in range(3):
        file.add([event], 2**32 - 1)
    assert not (tmp_path / "t.0").exists()
    file.add([event], 2**32 - 1)
    assert (tmp_path / "t.0").stat().st_size > 80 << 20
