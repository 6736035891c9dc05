"""Instructor's modes: tools, strict tools, JSON, JSON schema, and Anthropic's tools."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from support.agents import MODEL, QUESTION, Verdict

instructor = pytest.importorskip("instructor")
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_openai_modes(base_url: str, mode: str) -> None:
    made = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )
    assert isinstance(made.chat.completions.create(**ASKED, response_model=Verdict, max_retries=0), Verdict)
    *_, last = made.chat.completions.create_partial(**ASKED, response_model=Verdict, max_retries=0)
    assert Verdict.model_validate(last.model_dump())


def test_anthropic_tools(base_url: str) -> None:
    made = instructor.from_anthropic(
        anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    )
    assert isinstance(made.messages.create(**ASKED, response_model=Verdict, max_retries=0), Verdict)
