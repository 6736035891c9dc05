"""OpenAI's client on what the server keeps, also after a restart: responses in the background, conversations, chats."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.responses import accumulated
from support.server import Server, serving, wait_until

DEMO = Path(__file__).parents[2] / "gateway" / "penstock" / "gateway" / "demo_model"
SIMULATED = (str(DEMO), "--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "10")
SHORT: Any = {"model": "m", "input": "hi", "max_output_tokens": 16}
CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "store": True}
LONG: Any = {"model": "m", "input": "hi", "max_output_tokens": 1500, "background": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*SIMULATED, "--background-responses", "4") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def ended(client: openai.OpenAI, response_id: str) -> openai.types.responses.Response:
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    queued = client.responses.create(**SHORT, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    done = ended(client, queued.id)
    assert done.status in ("completed", "incomplete")
    assert done.output_text
    assert client.responses.create(**SHORT, previous_response_id=done.id).output_text


def test_cancel_frees_the_model_and_the_place(client: openai.OpenAI, server: Server) -> None:
    ids = [client.responses.create(**LONG).id for _ in range(4)]
    with pytest.raises(openai.InternalServerError) as full:
        client.responses.create(**LONG)
    assert full.value.status_code == 503
    wait_until(lambda: client.responses.retrieve(ids[0]).status == "in_progress")
    assert [client.responses.cancel(each).status for each in ids] == ["cancelled"] * 4
    assert client.responses.cancel(ids[0]).status == "cancelled"
    wait_until(lambda: server.state()["num_running"] == 0)
    assert client.responses.retrieve(ids[0]).status == "cancelled"


def test_a_stream_that_is_left_goes_on_and_is_resumed(client: openai.OpenAI) -> None:
    seen: list[dict[str, Any]] = []
    with client.responses.create(**LONG | {"max_output_tokens": 100}, stream=True) as stream:
        for event in stream:
            seen.append(event.to_dict(mode="json"))
            if len(seen) == 9:
                break
    response_id = seen[0]["response"]["id"]
    last = seen[-1]["sequence_number"]
    with client.responses.retrieve(response_id, stream=True, starting_after=last) as stream:
        rest = [event.to_dict(mode="json") for event in stream]
    [item] = accumulated(seen + rest)
    done = client.responses.retrieve(response_id)
    assert done.output_text == item["content"][0]["text"]
    with client.responses.retrieve(response_id, stream=True) as stream:
        assert [event.to_dict(mode="json") for event in stream] == seen + rest
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(response_id, stream=True, starting_after=10_000)
    assert refused.value.param == "starting_after"


def test_a_conversation(client: openai.OpenAI) -> None:
    hello: Any = {"type": "message", "role": "user", "content": "My name is Ada."}
    made = client.conversations.create(metadata={"topic": "names"}, items=[hello])
    assert client.conversations.update(made.id, metadata={"topic": "ada"}).metadata == {"topic": "ada"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "ada"}
    first = client.responses.create(**SHORT, conversation=made.id)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    second = client.responses.create(**SHORT, conversation=made.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    client.conversations.items.create(made.id, items=[hello])
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [(item.type, getattr(item, "role", "")) for item in items] == [
        ("message", role) for role in ("user", "user", "assistant", "user", "assistant", "user")
    ]
    assert client.conversations.items.retrieve(items[0].id, conversation_id=made.id) == items[0]
    assert client.conversations.items.delete(items[0].id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**SHORT, conversation=made.id)


def test_stored_chats(client: openai.OpenAI) -> None:
    chats = client.chat.completions
    kept = [chats.create(**CHAT, metadata={"turn": str(turn)}).id for turn in range(3)]
    assert [each.id for each in chats.list(limit=2)] == kept
    [found] = chats.list(metadata={"turn": "1"}, model="m")
    assert found == chats.retrieve(kept[1])
    assert [(message.id, message.content) for message in chats.messages.list(kept[1])] == [(f"{kept[1]}-0", "hi")]
    assert chats.update(kept[1], metadata={"a": "b"}).metadata == {"a": "b"}
    assert chats.delete(kept[1]).deleted
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(kept[1])


@pytest.mark.parametrize(("how", "reason"), [(signal.SIGKILL, "stopped"), (signal.SIGTERM, "shutting down")])
def test_what_is_kept_survives_the_server(tmp_path: Path, how: signal.Signals, reason: str) -> None:
    flags = (*SIMULATED, "--data-dir", str(tmp_path), "--drain-timeout", "0")
    with serving(*flags) as first:
        client = first.client()
        response = client.responses.create(**SHORT)
        conversation = client.conversations.create(items=[{"role": "user", "content": "hi"}])
        chat = client.chat.completions.create(**CHAT, metadata={"a": "b"})
        cut_off = client.responses.create(**LONG).id
        wait_until(lambda: client.responses.retrieve(cut_off).status == "in_progress")
        first.stop(how)
    with serving(*flags) as second:
        client = second.client()
        assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
        assert client.responses.create(**SHORT, previous_response_id=response.id).output_text
        assert len(list(client.conversations.items.list(conversation.id))) == 1
        assert client.chat.completions.retrieve(chat.id) == chat
        failed = client.responses.retrieve(cut_off)
        assert failed.status == "failed"
        assert failed.error is not None
        assert reason in failed.error.message
