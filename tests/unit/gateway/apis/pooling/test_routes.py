"""The routes over models whose numbers are known."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import NumericalError, QueueFullError
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from support.pooling import Setup

CLS, SEP, THE, A, DOG = 2, 3, 5, 10, 11


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def post(setup: Setup, path: str, body: dict[str, Any], **settings: Any) -> AsgiCall:
    return await call(build_app(setup.dataplane, AppSettings(**settings), None, setup.plane), path, body)


async def answer(setup: Setup, path: str, **body: Any) -> Any:
    done = await post(setup, path, body)
    assert done.status == 200, done.json()
    return done.json()


def scaled(*numbers: float) -> Any:
    return pytest.approx([number / math.hypot(*numbers) for number in numbers])


async def test_embeddings_stand_in_a_list_with_their_usage(setup: Setup) -> None:
    found = await answer(setup, "/v1/embeddings", model="embedder", input=["the dog", "dog"])
    assert found["id"].startswith("embd-")
    assert (found["object"], found["model"]) == ("list", "embedder")
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert [each["object"] for each in found["data"]] == ["embedding"] * 2
    assert found["data"][0]["embedding"] == scaled(4, CLS, SEP, 0)
    assert [list(text.ids) for text in setup.embedder.texts] == [[CLS, THE, DOG, SEP], [CLS, DOG, SEP]]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"input": "dog"}, [[CLS, DOG, SEP]]),
        ({"input": ""}, [[CLS, SEP]]),
        ({"input": [7, 8]}, [[7, 8]]),
        ({"input": [[7, 8], [9]]}, [[7, 8], [9]]),
        ({"input": "dog", "add_special_tokens": False}, [[DOG]]),
        ({"input": "dog", "prompt_name": "query"}, [[CLS, THE, DOG, SEP]]),
        ({"input": "dog " * 99, "truncate_prompt_tokens": -1}, [[CLS, *[DOG] * 14, SEP]]),
        ({"input": "dog " * 99, "truncate_prompt_tokens": 4}, [[CLS, DOG, DOG, SEP]]),
        ({"input": [7] * 99, "truncate_prompt_tokens": 4}, [[7] * 4]),
        ({"input": "dog " * 9000, "truncate_prompt_tokens": 4}, [[CLS, DOG, DOG, SEP]]),
    ],
)
async def test_what_the_model_gets(setup: Setup, fields: dict[str, Any], ids: list[list[int]]) -> None:
    await answer(setup, "/v1/embeddings", model="embedder", **fields)
    assert [list(text.ids) for text in setup.embedder.texts] == ids


async def test_forms_of_vectors(setup: Setup) -> None:
    async def vector(path: str = "/v1/embeddings", **fields: Any) -> Any:
        [data] = (await answer(setup, path, model="embedder", input="dog", **fields))["data"]
        return data.get("embedding", data.get("data"))

    assert await vector() == scaled(3, CLS, SEP, 0)
    assert await vector(dimensions=2) == scaled(3, CLS)
    assert await vector(normalize=False) == [3, CLS, SEP, 0]
    assert await vector(use_activation=False) == [3, CLS, SEP, 0]
    assert await vector(use_activation=True) == await vector(use_activation=False, normalize=True) == await vector()
    assert await vector("/pooling", use_activation=False) == [3, CLS, SEP, 0]
    packed = base64.b64decode(await vector(encoding_format="base64"))
    assert list(struct.unpack("<4f", packed)) == scaled(3, CLS, SEP, 0)
    assert await vector("/pooling", dimensions=2, task="embed") == scaled(3, CLS)


async def test_lengths_that_vectors_were_trained_for(setup: Setup) -> None:
    setup.plane.models.pooling_models()[0].dimensions = (2,)
    for length, status in ((2, 200), (4, 200), (3, 400)):
        done = await post(setup, "/v1/embeddings", {"model": "embedder", "input": "dog", "dimensions": length})
        assert done.status == status


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_puts_the_best_document_first(setup: Setup, path: str) -> None:
    documents = ["dog", {"text": "a dog the dog"}, "a dog"]
    found = await answer(setup, path, model="scorer", query="the dog", documents=documents, use_activation=False)
    assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [(1, 9), (2, 7), (0, 6)]
    assert found["results"][0]["document"] == {"text": "a dog the dog"}
    assert found["usage"]["total_tokens"] == 22
    first = setup.scorer.texts[0]
    assert (list(first.ids), list(first.types or ())) == ([CLS, THE, DOG, SEP, DOG, SEP], [0, 0, 0, 0, 1, 1])


async def test_rerank_shows_what_is_asked_for(setup: Setup) -> None:
    body = {"model": "scorer", "query": "dog", "documents": ["dog", "a dog"], "top_n": 1, "return_documents": False}
    found = await answer(setup, "/rerank", **body)
    assert found["results"] == [{"index": 1, "relevance_score": pytest.approx(1 / (1 + math.exp(-6)))}]
    await answer(setup, "/rerank", model="scorer", query="dog", documents=["a dog"], max_tokens_per_doc=1)
    assert list(setup.scorer.texts[-1].ids) == [CLS, DOG, SEP, A, SEP]
    await answer(setup, "/rerank", model="scorer", query="dog", documents=["a dog"], max_tokens_per_doc=0)
    assert list(setup.scorer.texts[-1].ids) == [CLS, DOG, SEP, A, DOG, SEP], "0 is no bound"


async def test_ranking_by_vectors_uses_the_prompts(setup: Setup) -> None:
    found = await answer(setup, "/rerank", model="embedder", query="dog", documents=["dog", "dog dog"])
    assert [list(text.ids)[1] for text in setup.embedder.texts] == [THE, A, A]
    assert [each["index"] for each in found["results"]] == [0, 1]
    assert found["results"][0]["relevance_score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"text_1": "dog", "text_2": "the dog"}, [6]),
        ({"text_1": "dog", "text_2": ["the dog", "dog"]}, [6, 5]),
        ({"text_1": ["dog", "a a"], "text_2": ["the dog", "dog"]}, [6, 6]),
        ({"queries": "dog", "documents": ["the dog", "dog"]}, [6, 5]),
        ({"queries": "dog", "items": ["the dog", "dog"]}, [6, 5]),
        ({"data_1": "dog", "data_2": ["the dog", "dog"]}, [6, 5]),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_score_takes_pairs_under_every_name_that_clients_use(
    setup: Setup, path: str, fields: dict[str, Any], lengths: list[int]
) -> None:
    found = await answer(setup, path, model="scorer", use_activation=False, **fields)
    assert found["data"] == [{"index": n, "object": "score", "score": score} for n, score in enumerate(lengths)]


async def test_scores_of_vectors(setup: Setup) -> None:
    found = await answer(setup, "/score", model="embedder", text_1=["dog", "a dog"], text_2=["dog", "a dog"])
    assert [each["score"] for each in found["data"]] == pytest.approx([1, 1])


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classify_gives_probabilities_or_raw_values(setup: Setup, path: str) -> None:
    [found] = (await answer(setup, path, model="classifier", input="a dog"))["data"]
    assert (found["label"], found["num_classes"]) == ("good", 3)
    assert sum(found["probs"]) == pytest.approx(1)
    assert found["probs"].index(max(found["probs"])) == 0
    [raw] = (await answer(setup, path, model="classifier", input="a dog", use_activation=False))["data"]
    assert raw["probs"] == [4, CLS, SEP]


async def test_pooling_of_a_classifier(setup: Setup) -> None:
    [found] = (await answer(setup, "/pooling", model="classifier", input="a dog", use_activation=False))["data"]
    assert found == {"index": 0, "object": "pooling", "data": [4, CLS, SEP]}


EMBED, RERANK, SCORE = "/v1/embeddings", "/v2/rerank", "/v1/score"
BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (EMBED, {"model": "embedder"}, "input"),
    ("/pooling", {"input": "dog"}, "model"),
    (EMBED, {"model": "embedder", "input": []}, "input"),
    (EMBED, {"model": "embedder", "input": [[]]}, "input"),
    (EMBED, {"model": "embedder", "input": ["dog", 1]}, "input"),
    (EMBED, {"model": "embedder", "input": {"text": "dog"}}, "input"),
    (EMBED, {"model": "embedder", "input": [-1]}, "input"),
    (EMBED, {"model": "embedder", "input": [90]}, "input"),
    (EMBED, {"model": "embedder", "input": [2**70]}, None),
    (EMBED, {"model": "embedder", "input": "dog " * 15}, "input"),
    (EMBED, {"model": "embedder", "input": "dog " * 9000}, "input"),
    (EMBED, {"model": "embedder", "input": [7] * 17}, "input"),
    (EMBED, {"model": "embedder", "input": ["dog"] * 2049}, "input"),
    (EMBED, {"model": "embedder", "input": "", "add_special_tokens": False}, "input"),
    (EMBED, {"model": "embedder", "input": "dog", "dimensions": 0}, "dimensions"),
    (EMBED, {"model": "embedder", "input": "dog", "dimensions": 5}, "dimensions"),
    (EMBED, {"model": "embedder", "input": "dog", "encoding_format": "hex"}, "encoding_format"),
    (EMBED, {"model": "embedder", "input": "dog", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (EMBED, {"model": "embedder", "input": "dog", "truncate_prompt_tokens": 17}, "truncate_prompt_tokens"),
    (EMBED, {"model": "embedder", "input": "dog", "truncation_side": "middle"}, "truncation_side"),
    (EMBED, {"model": "embedder", "input": "dog", "prompt_name": "passage"}, "prompt_name"),
    (EMBED, {"model": "embedder", "input": "dog", "messages": []}, "messages"),
    (EMBED, {"model": "embedder", "input": "dog", "embed_dtype": "float16"}, "embed_dtype"),
    (EMBED, {"model": "classifier", "input": "dog"}, "model"),
    (EMBED, {"model": "tiny", "input": "dog"}, "model"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": []}, "documents"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": ["dog"] * 2049}, "documents"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": ["dog " * 15]}, "documents"),
    (RERANK, {"model": "scorer", "query": "dog " * 15, "documents": ["dog"]}, "documents"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": [{"image": "x"}]}, None),
    (RERANK, {"model": "scorer", "query": ["dog"], "documents": ["dog"]}, "query"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": ["dog"], "top_n": -1}, "top_n"),
    (RERANK, {"model": "scorer", "query": "dog", "documents": ["dog"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    (RERANK, {"model": "embedder", "query": "dog", "documents": ["d"], "max_tokens_per_doc": 1}, "max_tokens_per_doc"),
    (RERANK, {"model": "embedder", "query": "dog " * 15, "documents": ["dog"]}, "query"),
    (RERANK, {"model": "classifier", "query": "dog", "documents": ["dog"]}, "model"),
    (SCORE, {"model": "scorer", "text_1": "dog"}, "text_2"),
    (SCORE, {"model": "scorer", "text_1": "dog", "queries": "dog", "text_2": "dog"}, "text_1"),
    (SCORE, {"model": "scorer", "text_1": "dog", "items": "dog", "data_2": "dog"}, "text_2"),
    (SCORE, {"model": "scorer", "text_1": ["dog", "a"], "text_2": ["dog", "a", "the"]}, "text_1"),
    (SCORE, {"model": "scorer", "text_1": [], "text_2": ["dog"]}, "text_1"),
    (SCORE, {"model": "scorer", "text_1": "dog", "text_2": []}, "text_2"),
    ("/classify", {"model": "embedder", "input": "dog"}, "model"),
    ("/pooling", {"model": "embedder", "input": "dog", "task": "classify"}, "task"),
    ("/pooling", {"model": "embedder", "input": "dog", "task": "token_embed"}, "task"),
    ("/pooling", {"model": "classifier", "input": "dog", "dimensions": 2}, "dimensions"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_requests(setup: Setup, path: str, body: dict[str, Any], param: str | None) -> None:
    done = await post(setup, path, body)
    error = done.json()["error"]
    assert done.status == 400, error
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param or param in error["message"]
    assert not [text for each in (setup.embedder, setup.scorer, setup.classifier) for text in each.texts]


async def test_too_long_a_text_is_named(setup: Setup) -> None:
    done = await post(setup, EMBED, {"model": "embedder", "input": ["dog", "dog " * 20]})
    error = done.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("input: text 1 has 22 tokens, and this model's maximum is 16.")


@pytest.mark.parametrize(("model", "status"), [("nowhere", 404), ("late", 503), ("tiny", 400)])
async def test_models_that_cannot_be_asked(setup: Setup, model: str, status: int) -> None:
    done = await post(setup, EMBED, {"model": model, "input": "dog"})
    assert done.status == status
    assert (status == 503) == ("retry-after" in done.headers)


@pytest.mark.parametrize(("error", "status"), [(QueueFullError("full"), 503), (NumericalError("nan"), 500)])
async def test_errors_of_the_model(setup: Setup, error: Exception, status: int) -> None:
    setup.embedder.meets = error
    assert (await post(setup, EMBED, {"model": "embedder", "input": "dog"})).status == status


async def test_a_deadline(setup: Setup) -> None:
    setup.embedder.meets = asyncio.Event()
    app = build_app(setup.dataplane, AppSettings(), None, setup.plane)
    done = await call(app, EMBED, {"model": "embedder", "input": "dog"}, headers={"x-request-timeout": "0.5"})
    assert (done.status, done.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert setup.embedder.cancelled.is_set()


async def test_the_servers_time_limit_is_not_for_what_nobody_waits_for(setup: Setup) -> None:
    """A line of a batch may wait for idle steps as long as it takes, as one of a language model does."""
    plane = PoolingPlane(setup.dataplane.models, request_timeout=30)
    contexts = [RequestContext(), RequestContext(background=True)]
    for context in contexts:
        await plane.rows(setup.plane.model("embedder", context), lambda: [TokenizedText([CLS, SEP])], 2, context)
    assert [context.deadline is None for context in contexts] == [False, True]


async def test_a_client_that_leaves(setup: Setup) -> None:
    setup.embedder.meets = asyncio.Event()
    app = build_app(setup.dataplane, AppSettings(), None, setup.plane)
    asking = AsgiCall(app, EMBED, {"model": "embedder", "input": "dog"})
    running = asyncio.create_task(asking.run())
    await setup.embedder.asked.wait()
    asking.disconnect()
    await running
    assert setup.embedder.cancelled.is_set()
    assert not asking.messages


async def test_tokens_count_against_the_key(setup: Setup) -> None:
    quota = Quota(Limits(tokens_per_minute=5))
    keys = ApiKeys({key_digest(b"key"): Principal(tenant="team", quota=quota, models=("embedder",))})
    app = build_app(setup.dataplane, AppSettings(keys=keys), None, setup.plane)

    async def asked(model: str = "embedder") -> int:
        body = {"model": model, "input": "dog dog dog"}
        return (await call(app, EMBED, body, headers={"authorization": "Bearer key"})).status

    assert [await asked(), await asked()] == [200, 429]
    [context] = setup.embedder.contexts
    assert (context.tenant, context.record.model) == ("team", "embedder")
    assert context.record.usage is not None
    assert context.record.usage.prompt_tokens == 5
    quota.spend_tokens(-5)
    assert await asked("scorer") == 403


async def test_models_are_listed(setup: Setup) -> None:
    app = build_app(setup.dataplane, AppSettings(), None, setup.plane)
    listed = (await call(app, "/v1/models", method="GET")).json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "embedder", "scorer", "classifier"]
    able = [each["capabilities"] for each in listed]
    assert able[1:] == [["embedding"], ["classify", "score", "rerank"], ["classify"]]
    one = (await call(app, "/v1/models/embedder", method="GET")).json()
    assert (one["id"], one["max_model_len"], one["created"]) == ("embedder", 16, 1_700_000_000)
    assert (await call(app, "/v1/models/late", method="GET")).status == 503
    assert (await call(app, "/v1/models/nothing", method="GET")).status == 404
    assert (await call(app, "/version", method="GET")).json()["runners"]["scorer"] == "fake"
