"""GET /v1/models for Anthropic's clients, at the paths of OpenAI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.gateway.apis.anthropic.models import model_page
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, MODEL, FakeDataPlane

VERSION = {"anthropic-version": "2023-06-01"}
ORG = replace(MODEL, name="org/other", created=0)
SHOWN = {
    "type": "model",
    "id": "tiny",
    "display_name": "tiny",
    "created_at": "2023-11-14T22:13:20Z",
    "lifecycle": "active",
    "max_input_tokens": INFO.context_length,
    "max_tokens": INFO.context_length,
}


async def get(path: str, headers: dict[str, str] = VERSION) -> AsgiCall:
    app = build_app(FakeDataPlane(models=(MODEL, ORG)), AppSettings())
    return await call(app, path, method="GET", headers=headers)


async def test_the_list() -> None:
    listed = (await get("/v1/models")).json()
    assert listed["data"][0] == SHOWN
    assert listed["data"][1]["created_at"] == "1970-01-01T00:00:00Z"
    assert {**listed, "data": []} == {"data": [], "has_more": False, "first_id": "tiny", "last_id": "org/other"}
    assert (await get("/v1/models", {})).json()["object"] == "list"


async def test_one_is_found_by_its_name_in_the_form_of_the_client() -> None:
    assert (await get("/v1/models/tiny")).json() == SHOWN
    assert (await get("/v1/models/org/other")).json()["id"] == "org/other"
    assert (await get("/v1/models/tiny", {})).json()["object"] == "model"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/models/unknown", 404, "not_found_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?limit=1001", 400, "invalid_request_error"),
        ("/v1/models?limit=x", 400, "invalid_request_error"),
        ("/v1/models?after_id=unknown", 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_form_of_the_client(path: str, status: int, kind: str) -> None:
    answer = await get(path)
    assert (answer.status, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert answer.headers["request-id"] == answer.json()["request_id"]
    assert "type" not in (await get(path, {})).json()


ROWS: list[tuple[dict[str, str], str, bool]] = [
    ({}, "abcde", False),
    ({"limit": "2"}, "ab", True),
    ({"limit": "2", "after_id": "b"}, "cd", True),
    ({"limit": "2", "after_id": "c"}, "de", False),
    ({"after_id": "e"}, "", False),
    ({"limit": "2", "before_id": "d"}, "bc", True),
    ({"limit": "2", "before_id": "c"}, "ab", False),
    ({"before_id": "a"}, "", False),
    ({"limit": "1", "after_id": "a", "before_id": "d"}, "b", True),
    ({"after_id": "d", "before_id": "b"}, "", False),
]


@pytest.mark.parametrize(("query", "ids", "has_more"), ROWS)
def test_pages_have_the_ids_that_were_asked_for_and_say_if_more_follow(
    query: dict[str, str], ids: str, has_more: bool
) -> None:
    page: dict[str, Any] = model_page([{"id": each} for each in "abcde"], query)
    assert ("".join(model["id"] for model in page["data"]), page["has_more"]) == (ids, has_more)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
