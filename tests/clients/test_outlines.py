"""Outlines over OpenAI's API and over vLLM's fields."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest

from support.agents import MODEL, QUESTION, Verdict

outlines = pytest.importorskip("outlines")


@pytest.fixture(params=["from_openai", "from_vllm"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return getattr(outlines, request.param)(client, MODEL)


def test_an_answer_in_json(model: Any) -> None:
    assert Verdict.model_validate_json(model(QUESTION, Verdict))


def test_choices_and_patterns(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = outlines.from_vllm(client, MODEL)
    assert model(QUESTION, Literal["Oslo", "Rome"]) in ("Oslo", "Rome")
    assert len(model(QUESTION, outlines.regex("[0-9]{3}"))) == 3
