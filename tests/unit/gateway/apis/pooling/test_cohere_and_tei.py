"""Cohere's /v1/embed and /v2/embed, and the forms of Text Embeddings Inference, over models whose numbers are known."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.gateway.apis.pooling.cohere import _FORMS
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from support.keys import api_keys
from support.pooling import Setup

CLS, SEP, THE, A, DOG = 2, 3, 5, 10, 11
LONG = "the " + "dog " * 99 + "a"
COHERE = ("/v1/embed", "/v2/embed")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def post(setup: Setup, path: str, **body: Any) -> AsgiCall:
    return await call(build_app(setup.dataplane, AppSettings(), None, setup.plane), path, body)


async def answer(setup: Setup, path: str, **body: Any) -> Any:
    done = await post(setup, path, **body)
    assert done.status == 200, done.json()
    return done.json()


def ids(setup: Setup) -> list[list[int]]:
    return [list(text.ids) for text in setup.embedder.texts]


def scaled(*numbers: float) -> Any:
    return pytest.approx([number / math.hypot(*numbers) for number in numbers])


# Cohere


async def test_the_second_version(setup: Setup) -> None:
    found = await answer(setup, "/v2/embed", model="embedder", texts=["dog", "a dog"], input_type="search_query")
    assert found["embeddings"] == {"float": [scaled(4, CLS, SEP, 0), scaled(5, CLS, SEP, 0)]}
    assert (found["texts"], found["response_type"]) == (["dog", "a dog"], "embeddings_by_type")
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 9}}
    assert found["id"]


async def test_the_first_version_has_vectors_without_a_type_unless_types_are_named(setup: Setup) -> None:
    found = await answer(setup, "/v1/embed", model="embedder", texts=["dog"])
    assert (found["embeddings"], found["response_type"]) == ([scaled(3, CLS, SEP, 0)], "embeddings_floats")
    assert found["meta"]["api_version"] == {"version": "1"}
    found = await answer(setup, "/v1/embed", model="embedder", texts=["dog"], embedding_types=["int8"])
    assert (list(found["embeddings"]), found["response_type"]) == (["int8"], "embeddings_by_type")


@pytest.mark.parametrize("path", COHERE)
async def test_all_types_at_once(setup: Setup, path: str) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    found = (await answer(setup, path, model="embedder", texts=["dog"], embedding_types=types))["embeddings"]
    assert list(found) == types
    assert found["int8"] == [[127, 85, 127, 0]]
    assert found["uint8"] == [[255, 213, 255, 128]]
    assert found["ubinary"] == [[0b11100000]]
    assert found["binary"] == [[0b11100000 - 128]]
    assert list(struct.unpack("<4f", base64.b64decode(found["base64"][0]))) == found["float"][0]


@given(hnp.arrays(np.float32, (3, 17), elements=st.floats(-2, 2, width=32)))
def test_bytes_stay_in_their_ranges_and_keep_signs(vectors: Any) -> None:
    signed, unsigned = np.array(_FORMS["int8"](vectors)), np.array(_FORMS["uint8"](vectors))
    assert (np.abs(signed) <= 127).all()
    assert (signed * np.sign(vectors) >= 0).all()
    assert (unsigned == signed + 128).all()
    bits = np.array(_FORMS["ubinary"](vectors), np.uint8)
    assert (np.unpackbits(bits, axis=1, count=17) == (vectors > 0)).all()
    assert (np.array(_FORMS["binary"](vectors)) == bits.astype(int) - 128).all()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [CLS, DOG, SEP]),
        ({"input_type": "search_query"}, [CLS, THE, DOG, SEP]),
        ({"input_type": "search_document"}, [CLS, A, DOG, SEP]),
        ({"input_type": "query"}, [CLS, THE, DOG, SEP]),
    ],
)
async def test_the_type_of_input_chooses_the_prompt(setup: Setup, fields: dict[str, Any], wanted: list[int]) -> None:
    done = await post(setup, "/v2/embed", model="embedder", texts=["dog"], **fields)
    assert (done.status, ids(setup)) == (200, [wanted])
    assert "x-penstock-ignored" not in done.headers


async def test_hints_that_nothing_is_made_of_are_reported(setup: Setup, tmp_path: Path) -> None:
    fields = {"texts": ["dog"], "input_type": "clustering", "priority": 3}
    done = await post(setup, "/v2/embed", model="embedder", **fields)
    assert (done.status, done.headers["x-penstock-ignored"]) == (200, "priority, input_type")
    plain = Setup(tmp_path, prompts={})
    done = await post(plain, "/v2/embed", model="embedder", texts=["dog"], input_type="search_query")
    assert "x-penstock-ignored" not in done.headers  # such a model needs no prompts


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [CLS, THE, *[DOG] * 13, SEP]),
        ({"truncate": "END"}, [CLS, THE, *[DOG] * 13, SEP]),
        ({"truncate": "START"}, [CLS, *[DOG] * 13, A, SEP]),
        ({"max_tokens": 4}, [CLS, THE, DOG, SEP]),
        ({"max_tokens": 99, "truncate": "START"}, [CLS, *[DOG] * 13, A, SEP]),
    ],
)
@pytest.mark.parametrize("path", COHERE)
async def test_long_texts_are_cut(setup: Setup, path: str, fields: dict[str, Any], wanted: list[int]) -> None:
    await answer(setup, path, model="embedder", texts=[LONG], **fields)
    assert ids(setup) == [wanted]


async def test_inputs_with_texts(setup: Setup) -> None:
    content = [{"type": "text", "text": "the"}, {"type": "text", "text": "dog"}]
    inputs = [{"content": content}, {"content": content[1:]}]
    found = await answer(setup, "/v2/embed", model="embedder", inputs=inputs, output_dimension=2)
    assert ids(setup) == [[CLS, THE, DOG, SEP], [CLS, DOG, SEP]]
    assert found["embeddings"]["float"] == [scaled(4, CLS), scaled(3, CLS)]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({}, 400, "texts"),
        ({"texts": []}, 400, "texts"),
        ({"texts": ["dog"] * 2049}, 400, "texts"),
        ({"texts": ["dog"], "inputs": []}, 400, "texts"),
        ({"texts": "dog"}, 400, "texts"),
        ({"texts": [LONG], "truncate": "NONE"}, 400, "truncate END or START"),
        ({"texts": ["dog"], "truncate": "MIDDLE"}, 400, "truncate"),
        ({"texts": ["dog"], "output_dimension": 5}, 400, "output_dimension"),
        ({"texts": ["dog"], "max_tokens": 0}, 400, "max_tokens"),
        ({"texts": ["dog"], "embedding_types": ["int4"]}, 400, "embedding_types"),
        ({"images": ["data:image/png;base64,aGk="]}, 400, "images"),
        ({"inputs": [{"content": [IMAGE]}]}, 400, "inputs[0].content[0]"),
        ({"texts": ["dog"], "model": "absent"}, 404, "model"),
        ({"texts": ["dog"], "model": "scorer"}, 400, "/v1/rerank"),
    ],
)
@pytest.mark.parametrize("path", COHERE)
async def test_errors_are_in_cohere_s_form(
    setup: Setup, path: str, fields: dict[str, Any], status: int, said: str
) -> None:
    done = await post(setup, path, **{"model": "embedder", **fields})
    assert (done.status, set(done.json())) == (status, {"id", "message"})
    assert said in done.json()["message"]
    assert setup.embedder.texts == []


async def test_what_comes_before_the_route_is_in_that_form_too(setup: Setup) -> None:
    settings = AppSettings(keys=api_keys({"red": "key"}))
    done = await call(build_app(setup.dataplane, settings, None, setup.plane), "/v2/embed", {"model": "embedder"})
    assert (done.status, set(done.json())) == (401, {"id", "message"})


# Text Embeddings Inference


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_texts_are_ranked_in_the_form_of_their_api(setup: Setup, path: str) -> None:
    body = {"query": "the dog", "texts": ["dog", "a dog the dog"]}
    found = await answer(setup, path, **body, raw_scores=True)
    assert found == [{"index": 1, "score": 9.0}, {"index": 0, "score": 6.0}]
    found = await answer(setup, path, **body, return_text=True, model="scorer")
    assert [each["text"] for each in found] == ["a dog the dog", "dog"]
    assert found[0]["score"] == pytest.approx(1 / (1 + math.exp(-9)))


async def test_long_pairs_are_cut_unless_the_request_says_no(setup: Setup) -> None:
    body = {"query": "dog", "texts": [LONG]}
    await answer(setup, "/rerank", **body)
    await answer(setup, "/rerank", **body, truncation_direction="Left")
    assert [list(text.ids)[-3:] for text in setup.scorer.texts] == [[DOG, DOG, SEP], [DOG, A, SEP]]
    done = await post(setup, "/rerank", **body, truncate=False)
    assert done.status == 400
    assert "truncate" in done.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{}, {"texts": ["a"], "documents": ["a"]}, {"texts": []}, {"texts": ["a"], "model": "absent"}]
)
async def test_what_cannot_be_ranked(setup: Setup, fields: dict[str, Any]) -> None:
    assert (await post(setup, "/rerank", query="dog", **fields)).status in (400, 404)
    assert setup.scorer.texts == []


async def test_vectors_alone(setup: Setup) -> None:
    assert await answer(setup, "/embed", inputs="dog") == [scaled(3, CLS, SEP, 0)]
    assert await answer(setup, "/embed", inputs=["dog", "a dog"], normalize=False) == [
        [3, CLS, SEP, 0],
        [4, CLS, SEP, 0],
    ]
    await answer(setup, "/embed", inputs=LONG)
    await answer(setup, "/embed", inputs=LONG, truncation_direction="Left")
    assert ids(setup)[-2:] == [[CLS, THE, *[DOG] * 13, SEP], [CLS, *[DOG] * 13, A, SEP]]
    done = await post(setup, "/embed", inputs=LONG, truncate=False)
    assert (done.status, done.json()["error"]["param"]) == (400, "inputs")


async def test_a_model_has_to_be_named_where_there_are_two(setup: Setup) -> None:
    setup.plane.models.pooling_models()[-1].loaded = True  # another one that gives embeddings
    done = await post(setup, "/embed", inputs="dog")
    assert (done.status, done.json()["error"]["param"]) == (400, "model")
    assert (await post(setup, "/embed", inputs="dog", model="embedder")).status == 200


# OpenAI's route


@pytest.mark.parametrize(("padding", "reported"), [("max_length", True), (True, True), (False, False), (None, False)])
async def test_padding_changes_nothing(setup: Setup, padding: object, reported: bool) -> None:
    done = await post(setup, "/v1/embeddings", model="embedder", input="dog", padding=padding)
    assert (done.status, done.json()["data"][0]["embedding"]) == (200, scaled(3, CLS, SEP, 0))
    assert ("x-penstock-ignored" in done.headers) == reported


@pytest.mark.parametrize(
    ("fields", "wanted", "reported"),
    [
        ({"input_type": "query"}, [CLS, THE, DOG, SEP], False),
        ({"input_type": "passage"}, [CLS, A, DOG, SEP], False),
        ({"input_type": "image"}, [CLS, DOG, SEP], True),
        ({"input_type": "image", "prompt_name": "query"}, [CLS, THE, DOG, SEP], False),
    ],
)
async def test_types_of_input(setup: Setup, fields: dict[str, Any], wanted: list[int], reported: bool) -> None:
    done = await post(setup, "/v1/embeddings", model="embedder", input="dog", **fields)
    assert (done.status, ids(setup)) == (200, [wanted])
    assert ("x-penstock-ignored" in done.headers) == reported


async def test_the_start_can_be_cut_off(setup: Setup) -> None:
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "left"}
    for text in (LONG, [7, 8, 9, 10, 11]):
        await answer(setup, "/v1/embeddings", model="embedder", input=text, **cut)
    assert ids(setup) == [[CLS, DOG, A, SEP], [8, 9, 10, 11]]
    await answer(setup, "/score", model="scorer", text_1="dog", text_2=LONG, **cut | {"truncate_prompt_tokens": -1})
    assert list(setup.scorer.texts[0].ids)[-3:] == [DOG, A, SEP]


async def test_what_is_too_long_for_the_model_is_refused_with_the_way_out(setup: Setup) -> None:
    done = await post(setup, "/v1/embeddings", model="embedder", input=LONG)
    assert done.status == 400
    assert "truncate_prompt_tokens" in done.json()["error"]["message"]
