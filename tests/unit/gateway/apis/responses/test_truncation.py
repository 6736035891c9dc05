"""`truncation: auto`: what goes of a conversation that is too long, and what never does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import ContextLengthError
from penstock.gateway.apis.responses.create import Messages, truncated
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import call
from protocol.fake_dataplane import INFO, FakeDataPlane

SHORT = ServedModel("short", "root", 0, msgspec.structs.replace(INFO, max_model_len=40))


def message(role: str, text: str = "x" * 10) -> dict[str, Any]:
    return {"role": role, "content": text}


class Wanted:
    """A request whose prompt has a token for each character."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.prompts = [[0] * sum(len(each["content"]) for each in messages)]


async def kept(messages: Messages, context: int, most: int | None = None, refused: int = 10**9) -> tuple[Any, int]:
    """What is left of the messages, and how often they were rendered."""
    tries = 0

    async def render(given: Messages) -> Any:
        nonlocal tries
        tries += 1
        wanted = Wanted(given)
        if len(wanted.prompts[0]) > refused:
            raise ContextLengthError("too long")
        return wanted

    wanted: Any = await truncated(messages, context, most, render)
    return wanted.messages, tries


TURNS = [message(role, f"{role[0]}{turn:09}") for turn in range(9) for role in ("user", "assistant")]
TALK = [message("system"), *TURNS]
ASK = [*TALK, message("user", "last " * 2)]


@pytest.mark.parametrize("refused", [10**9, 150])
async def test_the_oldest_turns_go_and_the_system_message_stays(refused: int) -> None:
    said, _ = await kept(ASK, 100, 20, refused)
    assert said == [ASK[0], *ASK[-7:]], "80 tokens are left, and a turn begins with its user"


async def test_what_fits_is_rendered_once_and_stays_whole() -> None:
    assert await kept(ASK, 210, 10) == (ASK, 1)
    assert await kept(ASK, 201) == (ASK, 1)


async def test_a_bound_of_the_answer_takes_a_quarter_of_the_context_at_most() -> None:
    assert (await kept(ASK, 400, 10_000))[0] == ASK
    assert len((await kept(ASK, 100, 10_000))[0]) == len((await kept(ASK, 100, 25))[0])


async def test_an_agent_s_turns_go_and_the_question_stays() -> None:
    step = [message("assistant"), message("tool")]
    said, _ = await kept([message("system"), message("user"), *step * 20], 100)
    assert said == [message("system"), message("user"), *step * 2]


LONG = "x" * 200


@pytest.mark.parametrize("messages", [[message("user", LONG)], [message("system", LONG), *TURNS[:2]], TALK[:1] * 20])
async def test_what_cannot_be_made_shorter_is_refused_as_without(messages: Messages) -> None:
    with pytest.raises(ContextLengthError):
        await kept(messages, 100, refused=99)
    assert (await kept(messages, 40))[0], "the engine refuses it"


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=300), context=st.integers(40, 400))
async def test_however_long_it_is_few_tries_find_what_fits(sizes: list[int], context: int) -> None:
    messages = [message("user", "x" * size) for size in sizes]
    said, tries = await kept(messages, context)
    assert tries <= 8
    assert said == messages[len(messages) - len(said) :]
    assert sum(len(each["content"]) for each in said) < context or len(said) == 1
    if 1 < len(said) < len(messages) and len(messages) < 64:
        more = messages[len(messages) - len(said) - 1 :]
        assert sum(len(each["content"]) for each in more) + context // 4 > context


@pytest.mark.parametrize(("truncation", "turns"), [("auto", 2), ("disabled", 4)])
async def test_a_whole_request(truncation: str, turns: int) -> None:
    plane = FakeDataPlane(models=(SHORT,))
    items = [{"role": "user", "content": f"u{number}" + "." * 12} for number in range(4)]
    body = {"model": "short", "input": items, "truncation": truncation}
    answer = await call(build_app(plane, AppSettings()), "/v1/responses", body)
    assert (answer.status, answer.json()["truncation"]) == (200, truncation)
    assert len(plane.requests[-1].prompts[0]) == 14 * turns, "the scripted engine has no bound of its own"
