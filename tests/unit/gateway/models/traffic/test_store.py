"""Public names in the place where the KServe fronts look for models."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import reports_ready
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    UnsupportedError,
)
from penstock.gateway.apis.kserve.http_models import statistics
from penstock.gateway.configuration.traffic_rules import (
    ShadowRule,
    ShiftRule,
    ShiftStep,
    TrafficRule,
    WeightedTarget,
)
from penstock.gateway.models.repository.host import RepositoryHost
from penstock.gateway.models.traffic.shadows import Result
from penstock.gateway.models.traffic.store import TrafficStore
from penstock.gateway.models.traffic.table import PublicName, RoutedCall, TrafficTable
from penstock.gateway.requests.context import ANYONE, Principal, RequestContext
from penstock.gateway.requests.record import Outcome
from support.kserve import FakeModel, FakeModelStore, add_sub, identity, repeat, responses


class Setup:
    def __init__(self, *models: FakeModel, elsewhere: str = "") -> None:
        self.own = FakeModelStore(*models)
        self.now = 0.0
        self.table = TrafficTable(clock=lambda: self.now, wall=lambda: 1000 + self.now)
        self.store = TrafficStore(self.own, self.table, lambda name: name == elsewhere)

    def put(self, *targets: WeightedTarget, name: str = "public", **fields: Any) -> PublicName:
        self.table.put(TrafficRule(name, targets, **fields))
        return self.table.names[name]

    async def ask(self, request: InferRequest, name: str = "public", version: str = "") -> str:
        """The target that has answered."""
        model = self.store.model(name, version, request)
        await model.infer(request)
        assert isinstance(request.caller, RequestContext)
        return request.caller.record.target


def floats(name: str, **options: Any) -> FakeModel:
    return identity("FP32", [1], name=name, **options)


def request(value: float = 1, *, headers: dict[bytes, bytes] | None = None, tenant: str = "", **fields: Any) -> Any:
    context = RequestContext(headers=headers or {}, principal=Principal(tenant=tenant))
    tensor = Tensor("INPUT0", "FP32", np.array([value], np.float32))
    return InferRequest(inputs={"INPUT0": tensor}, caller=context, tenant=tenant, **fields)


A, B = WeightedTarget("a", weight=3), WeightedTarget("b", weight=1)


async def test_versions_of_a_model_share_its_name_and_a_version_is_asked_directly() -> None:
    setup = Setup(floats("m"), floats("m", version=2), floats("other"))
    setup.put(WeightedTarget("m", 1, weight=0), WeightedTarget("m", 2), name="m")
    given = request()
    model = setup.store.model("m", "", given)
    assert (model.name, model.version) == ("m", 2)
    assert setup.store.model("m", "1", given).version == 1
    assert await setup.ask(request(), "m") == "m/2"
    assert setup.store.model("other") is setup.own.model("other")
    assert setup.store.versions("m") == [1, 2]
    assert [entry.name for entry in setup.store.index(ready=True)] == ["m", "m", "other"]


async def test_a_name_of_its_own_looks_like_its_first_target() -> None:
    setup = Setup(floats("a"), floats("b", version=7))
    setup.put(A, B)
    model = setup.store.model("public")
    assert (model.name, model.config.name, model.ready) == ("public", "public", True)
    assert setup.own.model("a").config.name == "a"
    assert setup.store.versions("public") == [1, 7]
    assert await setup.ask(request(), version="7") == "b"
    with pytest.raises(ModelNotFoundError, match="version 9 is not found"):
        setup.store.model("public", "9")
    [line] = [entry for entry in setup.store.index(ready=True) if entry.name == "public"]
    assert (line.state, line.reason) == ("READY", "served by a 0.75, b 0.25")
    assert [each["name"] for each in statistics(setup.store, ANYONE, "public")["model_stats"]] == ["a", "b"]


async def test_a_name_is_ready_while_one_of_its_targets_says_so() -> None:
    setup = Setup(floats("a"), floats("b"))
    setup.put(A, B)
    setup.own.model("a").says_ready = False
    assert reports_ready(setup.store.model("public"))
    setup.own.model("b").says_ready = False
    assert not reports_ready(setup.store.model("public"))
    assert await setup.ask(request()) in "ab"


async def test_shares_and_what_is_told_of_a_request() -> None:
    setup = Setup(floats("a"), floats("b"))
    public = setup.put(A, B)
    found = Counter([await setup.ask(request()) for _ in range(400)])
    assert abs(found["b"] - 100) < 45  # five standard deviations
    assert {target: counts.ended for target, counts in public.route.counts.items()} == {
        "a": {"ok": found["a"]},
        "b": {"ok": found["b"]},
    }


@pytest.mark.parametrize(
    ("sticky", "fields"),
    [("header:X-User", {"headers": {b"x-user": b"%d"}}), ("tenant", {"tenant": "%d"})],
)
async def test_sticky_requests_stay_and_when_weights_change_only_some_move(sticky: str, fields: dict[str, Any]) -> None:
    setup = Setup(floats("a"), floats("b"))

    def of(number: int) -> InferRequest:
        return request(
            headers={b"x-user": b"%d" % number} if "headers" in fields else None,
            tenant=str(number) if "tenant" in fields else "",
        )

    setup.put(A, B, sticky=sticky)
    first = [await setup.ask(of(number)) for number in range(60)]
    assert set(first) == {"a", "b"}
    assert [await setup.ask(of(number)) for number in range(60)] == first
    setup.put(A, WeightedTarget("b", weight=3), sticky=sticky)
    second = [await setup.ask(of(number)) for number in range(60)]
    assert {(before, after) for before, after in zip(first, second, strict=True) if before != after} == {("a", "b")}


async def test_a_request_that_a_model_makes_goes_where_its_client_s_does() -> None:
    setup = Setup(floats("a"), floats("b"))
    setup.put(A, B, sticky="header:x-user")
    host = RepositoryHost(setup.own, None)
    host.route(setup.store, setup.table.names.__contains__)
    assert host.model_ready("public")
    with pytest.raises(ModelNotFoundError):
        host.model("public")  # as a step of an ensemble
    for user in range(20):
        client = request(headers={b"x-user": b"%d" % user})
        target = await setup.ask(client)
        made = replace(client, caller=None, origin=client.caller)
        await host.model("public", -1, made).infer(made)
        assert setup.own.model(target).requests[-1] is made  # type: ignore[attr-defined]
        assert client.caller.record.target == target


async def test_a_sequence_stays_on_its_target_whatever_becomes_of_weights() -> None:
    setup = Setup(floats("a"), floats("b"))
    setup.put(WeightedTarget("a"), WeightedTarget("b", weight=0))
    assert await setup.ask(request(correlation_id=5, sequence_start=True)) == "a"
    setup.put(WeightedTarget("b"))
    assert await setup.ask(request(correlation_id=5)) == "a"
    assert await setup.ask(request(correlation_id=6, sequence_start=True)) == "b"
    setup.own.model("a").ready = False
    with pytest.raises(NotReadyError, match="the sequence runs on 'a', which is not available"):
        await setup.ask(request(correlation_id=5))
    setup.own.model("a").ready = True
    assert await setup.ask(request(correlation_id=5, sequence_end=True)) == "a"
    assert await setup.ask(request(correlation_id=5)) == "b"


async def test_the_share_of_a_target_that_is_not_there_goes_to_the_others() -> None:
    setup = Setup(floats("a"), floats("b"))
    public = setup.put(A, B, WeightedTarget("gone"), WeightedTarget("c", weight=0))
    setup.own.model("a").ready = False
    assert {await setup.ask(request()) for _ in range(20)} == {"b"}
    assert public.unavailable["a"] == "model 'a' is not at ready state"
    setup.own.model("b").ready = False
    for given in (None, request()):
        with pytest.raises(NotReadyError, match="'public' is not at ready state: model 'a' is not at ready"):
            setup.store.model("public", "", given)
    [line] = [entry for entry in setup.store.index(ready=False) if entry.name == "public"]
    assert line.state == "UNAVAILABLE"
    assert "public" not in {entry.name for entry in setup.store.index(ready=True)}


async def test_a_target_with_other_tensors_gets_nothing() -> None:
    setup = Setup(floats("a"), add_sub("b"), repeat("c"))
    public = setup.put(A, B, WeightedTarget("c"))
    assert {await setup.ask(request()) for _ in range(20)} == {"a"}
    assert public.unavailable == {
        "b": "its inputs are not those of 'a'",
        "c": "it batches, streams or has sequences unlike 'a'",
    }


async def test_adapters_and_embedding_models_are_not_asked_here() -> None:
    setup = Setup(floats("a"), elsewhere="lora")
    setup.put(A, WeightedTarget("lora"))
    with pytest.raises(UnsupportedError, match="'public' is served by 'lora', which is not a model of this API"):
        setup.store.model("public")
    assert setup.store.index(ready=False) == setup.own.index(ready=False)


async def test_every_request_ends_once_however_it_ends() -> None:
    setup = Setup(model := floats("a"))
    public = setup.put(WeightedTarget("a"))
    for error in (InvalidRequestError("bad"), EngineError("broken"), QueueFullError("full")):
        model.error = error
        with pytest.raises(type(error)):
            await setup.ask(request())
        given = request()
        with pytest.raises(type(error)):
            setup.store.model("public", "", given).stream(given)
    model.error, model.gate = None, asyncio.Event()
    asking = asyncio.create_task(setup.ask(request()))
    await model.waiting.wait()
    assert public.route.counts["a"].in_flight == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    counts = public.route.counts["a"]
    assert counts.ended == {"client_error": 2, "server_error": 2, "refused": 2, "cancelled": 1}
    assert (counts.accepted, counts.in_flight) == (7, 0)


async def test_streams_are_counted_when_they_end_and_when_they_are_left() -> None:
    setup = Setup(repeat("a"))
    public = setup.put(WeightedTarget("a"))

    def stream() -> Any:
        given = request()
        given.inputs = {"IN": Tensor("IN", "INT32", np.array([2], np.int32))}
        return setup.store.model("public", "", given).stream(given)

    assert len(await responses(stream())) == 3
    assert not stream().cancel()  # this model cannot be asked to stop
    left = stream()
    await left.__anext__()
    assert left.ready() is not None
    left.close()
    left.close()
    assert public.route.counts["a"].ended == {"ok": 1, "cancelled": 1}


async def test_a_shift_is_stopped_and_says_so() -> None:
    setup = Setup(floats("a"), broken := floats("b"))
    broken.error = EngineError("broken")
    shift = ShiftRule(to="b", steps=(ShiftStep(50, 60), ShiftStep(100, 60)), min_requests=5, max_error_rate=0.1)
    public = setup.put(WeightedTarget("a"), WeightedTarget("b"), shift=shift)
    sent = failed = 0
    while public.route.shares()["b"] or not sent:
        sent += 1
        try:
            await setup.ask(request())
        except EngineError:
            failed += 1
    assert failed == 5
    assert {await setup.ask(request()) for _ in range(20)} == {"a"}
    counts = public.route.counts
    assert (counts["a"].accepted, counts["b"].accepted) == (sent - failed + 20, failed)
    assert [event.text for event in setup.table.events] == [
        "rule set: a 1, b 0",
        "shift to b began: 50 %",
        "shift to b stopped and rolled back: error rate 1 above 0.1 (5 failed and 0 refused of 5)",
    ]


async def test_a_request_that_names_a_version_stops_no_shift() -> None:
    setup = Setup(floats("a"), floats("b", version=2))
    shift = ShiftRule(to="b", steps=(ShiftStep(50, 60), ShiftStep(100, 60)))
    public = setup.put(WeightedTarget("a"), WeightedTarget("b"), shift=shift)
    assert {await setup.ask(request(), version="1") for _ in range(20)} == {"a"}
    assert {await setup.ask(request(), version="2") for _ in range(20)} == {"b"}
    assert {await setup.ask(request()) for _ in range(50)} == {"a", "b"}
    assert public.route.shares() == {"a": 0.5, "b": 0.5}
    setup.own.model("a").ready = setup.own.model("b").ready = False
    with pytest.raises(NotReadyError):
        setup.store.model("public")
    assert public.route.shares() == {"a": 1, "b": 0}, "a shift whose target is gone has stopped"


async def settled(public: PublicName, count: int) -> Counter[Result]:
    """The results of shadows, when there are so many."""
    assert public.shadows is not None
    async with asyncio.timeout(20):
        while public.shadows.results.total() < count or public.shadows.in_flight:
            await asyncio.sleep(0)
    return public.shadows.results


async def test_shadows_compare_and_never_get_in_the_way() -> None:
    setup = Setup(floats("a"), shadow := floats("s"))
    public = setup.put(WeightedTarget("a"), shadow=ShadowRule("s", max_in_flight=2, absolute_tolerance=0.5))
    await setup.ask(request())
    assert await settled(public, 1) == {Result.EQUAL: 1}
    assert shadow.requests[0].caller.background

    shadow._compute = lambda asked: [Tensor("OUTPUT0", "FP32", asked.inputs["INPUT0"].array + 1)]
    await setup.ask(request())
    assert (await settled(public, 2))[Result.DIFFERENT] == 1

    shadow.error = EngineError("broken")
    await setup.ask(request())
    await settled(public, 3)
    shadow.error = QueueFullError("full")
    await setup.ask(request())
    results = await settled(public, 4)
    assert (results[Result.FAILED], results[Result.DROPPED]) == (1, 1)

    shadow.error, shadow.gate = None, asyncio.Event()
    for _ in range(5):  # none is held up by what the shadow holds
        await setup.ask(request())
    assert (results[Result.DROPPED], public.shadows.in_flight) == (4, 2)
    setup.table.stop_shadows()
    assert (await settled(public, 9))[Result.DROPPED] == 6
    await setup.ask(request())
    assert results[Result.DROPPED] == 7


async def test_what_cannot_be_sent_twice_has_no_shadow_and_a_failed_answer_is_not_compared() -> None:
    setup = Setup(model := floats("a"), floats("s"))
    public = setup.put(WeightedTarget("a"), shadow=ShadowRule("s"))
    await setup.ask(request(correlation_id=1, sequence_start=True))
    assert await settled(public, 1) == {Result.SKIPPED: 1}
    model.error = EngineError("broken")
    with pytest.raises(EngineError):
        await setup.ask(request())
    assert (await settled(public, 2))[Result.UNCOMPARED] == 1
    model.error = None
    given = request()
    await responses(setup.store.model("public", "", given).stream(given))
    assert (await settled(public, 3))[Result.EQUAL] == 1


async def test_a_share_of_the_requests_has_a_shadow_and_each_the_same_one_again() -> None:
    setup = Setup(floats("a"), floats("s"))
    public = setup.put(WeightedTarget("a"), sticky="tenant", shadow=ShadowRule("s", percent=25, max_in_flight=1000))
    for _ in range(2):
        for number in range(200):
            await setup.ask(request(tenant=str(number)))
    results = await settled(public, 1)
    assert results[Result.EQUAL] % 2 == 0
    assert abs(results[Result.EQUAL] / 2 - 50) < 31  # five standard deviations


async def test_a_new_rule_keeps_the_counts_of_its_targets() -> None:
    setup = Setup(floats("a"), floats("b"))
    setup.put(WeightedTarget("a"))
    await setup.ask(request())
    public = setup.put(WeightedTarget("a", weight=0), B)
    assert public.route.counts["a"].accepted == 1
    assert await setup.ask(request()) == "b"
    assert setup.table.remove("public")
    assert not setup.table.remove("public")
    with pytest.raises(ModelNotFoundError):
        setup.store.model("public")


async def test_targets_of_an_earlier_rule_are_there_only_while_sequences_are_on_them() -> None:
    setup = Setup(floats("a"), floats("b", version=7))
    setup.put(WeightedTarget("a"))
    assert await setup.ask(request(correlation_id=5, sequence_start=True)) == "a"
    setup.put(WeightedTarget("b"))
    assert setup.store.versions("public") == [1, 7]
    assert await setup.ask(request(correlation_id=5, sequence_end=True)) == "a"
    assert setup.store.versions("public") == [7]


async def test_what_an_earlier_rule_still_has_in_flight_stands_in_nobody_s_way() -> None:
    """A rule that led to an adapter, which this API does not have, and a request that is still there."""
    setup = Setup(floats("a"), elsewhere="lora")
    public = setup.put(WeightedTarget("lora"))
    call = RoutedCall(setup.table, public, "lora")
    public = setup.put(WeightedTarget("a"))
    assert await setup.ask(request()) == "a"
    assert public.route.counts["lora"].in_flight == 1
    call.end(Outcome.OK)
    assert public.route.counts["lora"].in_flight == 0


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_shift_of_an_earlier_rule_says_nothing_any_more(replaced: bool) -> None:
    setup = Setup(floats("a"), broken := floats("b"))
    shift = ShiftRule(to="b", steps=(ShiftStep(100, 60),), min_requests=1)
    setup.put(WeightedTarget("a"), WeightedTarget("b"), shift=shift)
    broken.error, broken.gate = EngineError("broken"), asyncio.Event()
    asking = asyncio.create_task(setup.ask(request()))
    await broken.waiting.wait()
    if replaced:
        setup.put(WeightedTarget("a"))
    else:
        setup.table.remove("public")
    before = len(setup.table.events)
    broken.gate.set()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(setup.table.events) == before
