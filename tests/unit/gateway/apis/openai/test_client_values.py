"""Values that clients send without meaning much by them: which are taken, and which are refused, on every route."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.gateway.apis.openai.validation import real_tier, tier_priority
from penstock.gateway.models.language.dataplane import GenerateRequest, ServedModel
from penstock.gateway.models.language.prompts import Truncation
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane

CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    TEXT: {"model": "tiny", "prompt": "hi"},
    RESPONSES: {"model": "tiny", "input": "hi"},
    ANTHROPIC: {"model": "tiny", "messages": HI, "max_tokens": 5},
}
CALL = {"name": "f", "arguments": "{}"}
CALLED: dict[str, Any] = {"role": "assistant", "content": "x", "function_call": None, "audio": None}
VERBOSE = ServedModel("verbose", "root", 0, INFO, template_variables=frozenset({"verbosity"}))
MODEL = ServedModel("tiny", "root", 0, INFO, template_variables=frozenset())


async def asked(path: str, fields: dict[str, Any], **settings: Any) -> tuple[AsgiCall, FakeDataPlane]:
    dataplane = FakeDataPlane(models=(MODEL, VERBOSE))
    answer = await call(build_app(dataplane, AppSettings(**settings)), path, BODIES[path] | fields)
    return answer, dataplane


async def wanted(path: str, fields: dict[str, Any], **settings: Any) -> GenerateRequest:
    answer, dataplane = await asked(path, fields, **settings)
    assert answer.status == 200, answer.json()
    return dataplane.requests[0]


TAKEN: list[tuple[str, dict[str, Any]]] = [
    *[
        (path, fields)
        for path in (CHAT, TEXT)
        for fields in (
            {"top_p": 0},
            {"max_tokens": -1},
            {"n": 1.0},
            {"n": 2, "best_of": 2},
            {"best_of": 1},
            {"user": ""},
            {"stream": True, "stream_options": {"include_usage": True}},
            {"suffix": None, "tools": None, "tool_choice": "none", "top_logprobs": 0, "functions": None},
        )
    ],
    *[
        (path, {"service_tier": tier})
        for path in (CHAT, RESPONSES)
        for tier in (None, "auto", "default", "flex", "scale", "priority", "fast")
    ],
    *[
        (path, fields)
        for path in (CHAT, RESPONSES)
        for fields in (
            {"metadata": {}},
            {"metadata": {"a" * 64: "x" * 512} | {str(number): "" for number in range(15)}},
            {"safety_identifier": "x" * 64, "prompt_cache_key": "k" * 64, "user": "me"},
            {"store": False},
        )
    ],
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"verbosity": "medium"}),
    (CHAT, {"messages": [CALLED], "stream": True, "stream_options": {"include_obfuscation": False}}),
    (CHAT, {"reasoning_effort": "none"}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (CHAT, {"verbosity": "low", "model": "verbose"}),
    (RESPONSES, {"text": {"verbosity": "high"}, "model": "verbose"}),
    (RESPONSES, {"store": True, "logprobs": False, "n": 1.0}),
    (ANTHROPIC, {"service_tier": "auto", "max_tokens": 5.0}),
    (ANTHROPIC, {"service_tier": "standard_only", "top_k": -1}),
]


@pytest.mark.parametrize(("path", "fields"), TAKEN)
async def test_what_means_little_is_taken(path: str, fields: dict[str, Any]) -> None:
    await wanted(path, fields)


@pytest.mark.parametrize(("path", "field"), [(CHAT, "user"), (TEXT, "user")])
async def test_of_a_long_name_its_beginning_is_the_session(path: str, field: str) -> None:
    """Replicas remember sessions: a client's megabytes are not kept for each."""
    assert (await wanted(path, {field: "x" * 100_000})).session == "x" * 128


INVALID, UNSUPPORTED = None, "unsupported_parameter"
REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    *[
        (path, fields, param, code)
        for path in (CHAT, TEXT)
        for fields, param, code in (
            ({"max_tokens": -2}, "max_tokens", INVALID),
            ({"max_tokens": 0}, "max_tokens", INVALID),
            ({"n": 1.5}, "n", INVALID),
            ({"n": "1"}, "n", INVALID),
            ({"n": 0.0}, "n", INVALID),
            ({"n": 2, "best_of": 1}, "best_of", INVALID),
            ({"n": 2, "best_of": 3}, "best_of", UNSUPPORTED),
            ({"best_of": "1"}, "best_of", INVALID),
            ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
            ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
        )
    ],
    *[
        (path, fields, param, code)
        for path in (CHAT, RESPONSES)
        for fields, param, code in (
            ({"user": 5}, "user", INVALID),
            ({"modalities": ["audio"]}, "modalities", UNSUPPORTED),
            ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
        )
    ],
    (TEXT, {"functions": [{"name": "f"}]}, "functions", UNSUPPORTED),
    (RESPONSES, {"moderation": {"model": "m"}}, "moderation", UNSUPPORTED),
    (RESPONSES, {"metadata": {"a" * 65: "x"}}, "metadata", INVALID),
    (RESPONSES, {"metadata": {"a": "x" * 513}}, "metadata", INVALID),
    (RESPONSES, {"metadata": {str(number): "" for number in range(17)}}, "metadata", INVALID),
    (RESPONSES, {"metadata": {"a": 5}}, "metadata[...]", INVALID),
    (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs", INVALID),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens", INVALID),
    (RESPONSES, {"max_output_tokens": -1}, "max_output_tokens", INVALID),
    (RESPONSES, {"best_of": 2}, "best_of", UNSUPPORTED),
    (TEXT, {"tools": [{"type": "function"}]}, "tools", UNSUPPORTED),
    (TEXT, {"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
    (TEXT, {"top_logprobs": 3}, "top_logprobs", UNSUPPORTED),
    *[(path, {"logits_processors": ["x"]}, "logits_processors", UNSUPPORTED) for path in (CHAT, TEXT, RESPONSES)],
    (RESPONSES, {"prediction": {"type": "content", "content": "x"}}, "prediction", UNSUPPORTED),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), REFUSED)
async def test_what_cannot_be_is_refused_by_name_and_runs_nothing(
    path: str, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer, dataplane = await asked(path, fields)
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, code)
    assert dataplane.requests == []
    assert dataplane.prompts == []


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": 1.5}])
async def test_refused_messages(fields: dict[str, Any]) -> None:
    answer, _ = await asked(ANTHROPIC, fields)
    assert answer.status == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_key": None, "prompt_cache_retention": None}, 0),
        ({"prompt_cache_key": "k"}, 300),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_retention": "in-memory"}, 300),
        ({"prompt_cache_retention": "24h", "prompt_cache_key": "k"}, 86400),
    ],
)
async def test_how_long_a_prompt_stays_cached(path: str, fields: dict[str, Any], seconds: int) -> None:
    assert (await wanted(path, fields)).cache_retention == seconds


CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
FOR_AN_HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
TEXT_BLOCK = {"type": "text", "text": "hi"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT_BLOCK | FOR_AN_HOUR]}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"cache_control": None}, 0),
        (CACHED, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": None}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        (FOR_AN_HOUR, 3600),
        ({"system": [TEXT_BLOCK | FOR_AN_HOUR, TEXT_BLOCK | CACHED]}, 3600),
        ({"messages": [{"role": "user", "content": [TEXT_BLOCK, TEXT_BLOCK | CACHED]}]}, 300),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]}, 3600),
        ({"tools": [{"name": "f", "input_schema": {}} | FOR_AN_HOUR], "tool_choice": {"type": "none"}}, 3600),
    ],
)
async def test_how_long_a_message_stays_cached(fields: dict[str, Any], seconds: int) -> None:
    assert (await wanted(ANTHROPIC, fields)).cache_retention == seconds


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_all_that_the_context_leaves(path: str) -> None:
    assert (await wanted(path, {"max_tokens": -1})).params.max_tokens == 0


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(("sent", "seed"), [(-1, None), (-1.0, None), (-2, -2), (0, 0), (None, None)])
async def test_a_seed_of_minus_one_is_none(path: str, sent: float | None, seed: int | None) -> None:
    """As in llama.cpp, Ollama and vLLM, whose clients send it."""
    assert (await wanted(path, {"seed": sent})).params.seed == seed


async def test_whole_numbers_written_as_floats() -> None:
    request = await wanted(CHAT, {"n": 2.0, "max_tokens": 7.0, "seed": -5.0, "top_k": 3.00, "temperature": 1.0})
    params = request.params
    assert (request.n, params.max_tokens, params.seed, params.top_k, params.temperature) == (2, 7, -5, 3, 1.0)


@pytest.mark.parametrize(
    ("fields", "policy", "level", "shown"),
    [
        ({"service_tier": "flex"}, "priority", 1, "flex"),
        ({"service_tier": "auto"}, "priority", 0, "default"),
        ({"service_tier": "scale"}, "priority", 0, "default"),
        ({"service_tier": "priority"}, "priority", -1, "default"),
        ({"service_tier": "flex"}, "fcfs", 0, "default"),
        ({"service_tier": "flex", "priority": -4}, "priority", -4, "default"),
    ],
)
async def test_a_service_tier_becomes_a_priority_and_is_shown(
    fields: dict[str, Any], policy: str, level: int, shown: str
) -> None:
    """Nobody runs early whose key does not say so: the data plane takes the later of the two."""
    for path in (CHAT, RESPONSES):
        answer, dataplane = await asked(path, fields, policy=policy)
        assert (dataplane.requests[0].priority, answer.json()["service_tier"]) == (level, shown)
    streamed, _ = await asked(CHAT, fields | {"stream": True}, policy=policy)
    assert all(event["service_tier"] == shown for event in streamed.events() if isinstance(event, dict))


def test_a_key_may_allow_the_early_tier() -> None:
    def shown(tier: Any, of_key: int) -> str:
        context = RequestContext(principal=Principal(tenant="t", priority=of_key))
        params = SamplingParams(max_tokens=1)
        priority = tier_priority(tier, "priority")
        return real_tier(
            tier, GenerateRequest(model="m", prompts=[], params=params, priority=priority, context=context)
        )

    assert [shown("priority", level) for level in (-3, 0, 5)] == ["priority", "default", "default"]
    assert [shown("flex", level) for level in (-3, 0, 5)] == ["flex"] * 3
    assert [shown(tier, 5) for tier in ("auto", None)] == ["default"] * 2


async def test_who_names_no_tier_sees_none() -> None:
    answer, _ = await asked(CHAT, {})
    assert "service_tier" not in answer.json()
    assert "metadata" not in answer.json()


async def test_metadata_is_shown_again() -> None:
    for path in (CHAT, RESPONSES):
        answer, _ = await asked(path, {"metadata": {"a": "b"}})
        assert answer.json()["metadata"] == {"a": "b"}


async def test_the_safety_identifier_tells_users_apart() -> None:
    for path in (CHAT, RESPONSES):
        request = await wanted(path, {"user": "u", "safety_identifier": "s"}, policy="fair")
        assert request.tenant == "s"


async def test_a_template_with_verbosity_gets_it() -> None:
    _, dataplane = await asked(CHAT, {"verbosity": "low", "model": "verbose"})
    assert dataplane.prompts[0][1]["kwargs"] == {"verbosity": "low"}


async def test_every_chunk_but_the_last_says_that_its_usage_is_null() -> None:
    for path in (CHAT, TEXT):
        answer, _ = await asked(path, {"stream": True, "stream_options": {"include_usage": True}})
        *chunks, last = [event for event in answer.events() if isinstance(event, dict)]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(("joins", "given", "status"), [(True, False, 200), (False, True, 200), (False, False, 400)])
async def test_spaces_between_special_tokens(joins: bool, given: bool, status: int) -> None:
    model = ServedModel("tiny", "root", 0, INFO, joins_special_tokens=joins)
    for path in (CHAT, TEXT):
        app = build_app(FakeDataPlane(models=(model,)), AppSettings())
        answer = await call(app, path, BODIES[path] | {"spaces_between_special_tokens": given})
        assert answer.status == status
        if status == 400:
            assert answer.json()["error"]["param"] == "spaces_between_special_tokens"


async def test_texts_for_the_data_plane_arrive() -> None:
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    for path in (CHAT, TEXT):
        request = await wanted(path, {"bad_words": ["a b", "c"], "allowed_token_ids": [7, 3, 7], **cut})
        assert request.bad_words == ("a b", "c")
        assert request.params.allowed_token_ids == (3, 7)
        assert request.truncation == Truncation(5, "right")
    response = await wanted(RESPONSES, {"bad_words": ["x"]})
    assert response.bad_words == ("x",)
