"""The tensor plane: what all fronts have in common, without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, PermissionDeniedError
from penstock.gateway.apis.kserve.tensor_plane import Moments, TensorPlane
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.requests.context import Principal, RequestContext
from support.kserve import FakeModel, FakeModelStore, identity, responses
from support.kserve_http import kserve_context

MOMENTS = Moments(received="RECEIVED", sending="SENDING", began="BEGAN", sent="SENT")
OUTPUT = Tensor("OUTPUT0", "FP32", np.zeros(1, np.float32))


def one() -> FakeModel:
    return identity("FP32", [1], name="m")


def request() -> InferRequest:
    return InferRequest(inputs={"INPUT0": Tensor("INPUT0", "FP32", np.zeros(1, np.float32))})


class Traced:
    """A plane whose requests are all traced."""

    def __init__(self, model: FakeModel, folder: Path) -> None:
        self._path = folder / "t.json"
        self._tracing = Tracing(str(self._path))
        self._tracing.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
        self.plane: TensorPlane = kserve_context(FakeModelStore(model), tracing=self._tracing).plane

    def marks(self) -> list[str]:
        self._tracing.close()
        events = json.loads(self._path.read_text())
        return [event["timestamps"][0]["name"] for event in events if "timestamps" in event]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_trace_has_each_moment_once(streamed: bool, tmp_path: Path) -> None:
    model = one()
    model.script = lambda _: [InferResponse([OUTPUT], final=last) for last in (False, False, True)]
    traced = Traced(model, tmp_path)
    call = traced.plane.begin(model, "", request(), RequestContext(), MOMENTS, began=1)
    if streamed:
        assert len(await responses(call.stream())) == 3
    else:
        await call.infer()
    call.sent()
    call.close()
    ends = ["SENDING", "REQUEST_END"] if streamed else ["REQUEST_END", "SENDING"]
    assert traced.marks() == ["BEGAN", "RECEIVED", "REQUEST_START", *ends, "SENT"]


async def test_a_request_that_fails_leaves_nothing_behind_its_failure(tmp_path: Path) -> None:
    model = one()
    model.script = lambda _: [InferResponse(None, error=EngineError("broken"), final=True)]
    traced = Traced(model, tmp_path)
    call = traced.plane.begin(model, "", request(), RequestContext(), MOMENTS, began=1)
    assert [response.error is not None for response in await responses(call.stream())] == [True]
    call.close()
    assert traced.marks() == ["BEGAN", "RECEIVED", "REQUEST_START"]


async def test_the_model_that_serves_now_gets_the_request() -> None:
    old, new = one(), one()
    store = FakeModelStore(old)
    plane = kserve_context(store).plane
    context = RequestContext(principal=Principal(tenant="t"))
    context.deadline = 5.0
    found = await plane.find("m", "", context)
    store.by_name["m"][1] = new
    call = plane.begin(found, "", request(), context)
    await call.infer()
    assert (old.requests, [taken.tenant for taken in new.requests]) == ([], ["t"])
    assert (new.requests[0].caller, new.requests[0].deadline, context.record.model) == (context, 5.0, "m")


async def test_a_model_that_a_caller_may_not_use_tells_nothing() -> None:
    plane = kserve_context(FakeModelStore(one())).plane
    context = RequestContext(principal=Principal(tenant="t", models=("other",)))
    for find in (plane.find, plane.find_before_body, plane.describe):
        for name in ("m", "nothing"):
            with pytest.raises(PermissionDeniedError):
                await find(name, "", context)


def test_regions_are_the_caller_s_where_there_may_be_any() -> None:
    context = RequestContext(principal=Principal(tenant="t"))
    off, on = (kserve_context(FakeModelStore(), allow_shared_memory=allowed) for allowed in (False, True))
    assert off.plane.regions(context, context.hold_more) is off.shared_memory
    assert on.plane.regions(context, context.hold_more) is not on.shared_memory
    assert (off.plane.takes_memory, on.plane.takes_memory) == (False, True)
