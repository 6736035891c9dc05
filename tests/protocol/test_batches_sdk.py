"""Files and batches by OpenAI's client, against real servers: their course, their ends, and kill -9 in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from support.server import Server, serving, wait_until

ENDED = ("completed", "failed", "expired", "cancelled")
SIMULATED = ("--engine", "simulated", "--served-model-name", "m")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("data")
    flags = ("--data-dir", str(folder), "--api-key", "red,blue", "--data-size", "1000000", "--sim-step-ms", "2")
    with serving(*SIMULATED, *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client("red")


def line(name: str, *, url: str = "/v1/completions", method: str = "POST", **body: Any) -> str:
    fields = {"model": "m", "prompt": name, "max_tokens": 4} | body
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": fields}) + "\n"


def uploaded(client: openai.OpenAI, *lines: str) -> str:
    return client.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch").id


def started(client: openai.OpenAI, *lines: str, endpoint: Any = "/v1/completions", **options: Any) -> str:
    file = uploaded(client, *lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, **{"completion_window": "24h"} | options).id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, 60)
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in found]


def test_a_file(client: openai.OpenAI, server: Server) -> None:
    file = client.files.create(file=("in.jsonl", b"some\nbytes"), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", 10, "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"some\nbytes"
    other = client.files.create(
        file=("b", b""), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert other.expires_at == other.created_at + 3600
    assert client.files.content(other.id).read() == b""
    assert [each.id for each in client.files.list(limit=1)][:2] == [other.id, file.id], "in pages of one"
    for use in (server.client("blue").files.retrieve, server.client("blue").files.delete):
        with pytest.raises(openai.NotFoundError):
            use(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_a_batch_from_its_beginning_to_its_files(client: openai.OpenAI, server: Server) -> None:
    wrong = line("wrong", max_tokens=-5)
    batch_id = started(client, line("a"), "\n", wrong, line("b", n=2), metadata={"for": "test"})
    batch = ended(client, batch_id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert batch.metadata == {"for": "test"}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert (names(good), names(bad)) == (["a", "b"], ["wrong"])
    assert {each["response"]["status_code"] for each in good} == {200}
    assert len(good[1]["response"]["body"]["choices"]) == 2
    assert bad[0]["response"]["status_code"] == 400
    assert bad[0]["response"]["body"]["error"]["param"] == "max_tokens"
    assert batch_id in [each.id for each in client.batches.list(limit=1)]
    with pytest.raises(openai.NotFoundError):
        server.client("blue").batches.retrieve(batch_id)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "prompt": None}, "chat.completion"),
        ("/v1/responses", {"input": "Hi", "prompt": None, "max_tokens": None, "max_output_tokens": 16}, "response"),
    ],
)
def test_batches_take_chats_and_responses(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    batch = ended(client, started(client, line("a", url=endpoint, **body), endpoint=endpoint))
    assert batch.status == "completed"
    [result] = results(client, batch.output_file_id)
    assert (result["response"]["status_code"], result["response"]["body"]["object"]) == (200, kind)


def test_what_is_wrong_with_a_file_is_said_before_anything_runs(client: openai.OpenAI) -> None:
    streamed = line("s", stream=True)
    lines = [line("a"), "{no json}\n", line("a"), line("u", url="/v1/embeddings"), line("g", method="GET"), streamed]
    batch = ended(client, started(client, *lines))
    assert (batch.status, batch.output_file_id, batch.failed_at is not None) == ("failed", None, True)
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
        (5, "invalid_method"),
        (6, "invalid_request"),
    ]
    assert ended(client, started(client, "\n")).errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"endpoint": "/v1/images"}, openai.BadRequestError, "endpoint"),
        ({"completion_window": "soon"}, openai.BadRequestError, "completion_window"),
        ({"completion_window": "31d"}, openai.BadRequestError, "completion_window"),
        ({"input_file_id": "file-none"}, openai.NotFoundError, "input_file_id"),
        ({"metadata": {"k": "v" * 600}}, openai.BadRequestError, "metadata"),
        (
            {"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 1}}},
            openai.BadRequestError,
            "output_expires_after.seconds",
        ),
    ],
)
def test_bad_batches(client: openai.OpenAI, fields: Any, error: type[openai.APIStatusError], param: str) -> None:
    asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": uploaded(client, "x")}
    with pytest.raises(error) as refused:
        client.batches.create(**asked | fields)
    assert refused.value.param == param


def test_bad_files(client: openai.OpenAI, server: Server) -> None:
    for purpose in ("fine-tune", "poetry"):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a", b"x"), purpose=purpose)  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError) as full:
        openai.OpenAI(base_url=client.base_url, api_key="red", max_retries=0).files.create(
            file=("a", b"x" * 1_000_001), purpose="batch"
        )
    assert full.value.status_code == 503
    url, key = f"{server.url}/v1/files", {"Authorization": "Bearer red"}
    no_form = httpx.post(url, json={"purpose": "batch"}, headers=key)
    assert (no_form.status_code, "must be multipart/form-data" in no_form.text) == (400, True)
    for seconds in ("9" * 5000, "3599", "x", "²"):
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
        late = httpx.post(url, data=form, files={"file": b"x"}, headers=key)
        assert (late.status_code, late.json()["error"]["param"]) == (400, "expires_after.seconds")
    broken = {"Content-Type": "multipart/form-data; boundary=x"} | key
    endless = b"a" * 10_000  # a part's field is not kept until its end
    for content in (b"--y\r\nnothing", b"--x\r\n" + endless, b"--x\r\nname: " + endless):
        refused = httpx.post(url, content=content, headers=broken)
        assert (refused.status_code, "cannot be read" in refused.text) == (400, True)
    none = httpx.get(f"{url}?limit=0", headers=key)
    assert (none.status_code, none.json()["error"]["param"]) == (400, "limit")
    assert httpx.get(url).status_code == 401


def test_a_batch_that_is_cancelled_keeps_what_was_answered(client: openai.OpenAI) -> None:
    slow = [line(f"slow {n}", max_tokens=3000) for n in range(40)]
    batch_id = started(client, line("quick"), *slow)
    wait_until(lambda: bool(client.batches.retrieve(batch_id).request_counts.completed))  # type: ignore[union-attr]
    input_file = client.batches.retrieve(batch_id).input_file_id
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.files.delete(input_file)
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = ended(client, batch_id)
    assert batch.status == "cancelled"
    assert names(results(client, batch.output_file_id)) == ["quick"]
    assert {each["error"]["code"] for each in results(client, batch.error_file_id)} == {"batch_cancelled"}
    assert len(results(client, batch.error_file_id)) == 40
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch_id)
    assert client.files.delete(input_file).deleted


@pytest.fixture(scope="module")
def in_memory() -> Iterator[Server]:
    with serving(*SIMULATED, "--api-key", "red,blue", "--data-memory", "1000000") as running:
        yield running


def test_without_a_folder_files_and_batches_are_in_memory(in_memory: Server) -> None:
    red, blue = in_memory.client("red"), in_memory.client("blue")
    batch = ended(red, started(red, line("a"), line("wrong", max_tokens=-5), line("b")))
    assert (batch.status, batch.model_extra) == ("completed", {"volatile": True})
    assert names(results(red, batch.output_file_id)) == ["a", "b"]
    assert names(results(red, batch.error_file_id)) == ["wrong"]
    files = red.files.list().data
    assert {(file.model_extra or {}).get("volatile") for file in files} == {True}
    assert all(file.expires_at for file in files)
    for file_id in (batch.input_file_id, batch.output_file_id):
        for use in (blue.files.retrieve, blue.files.content, blue.files.delete):
            with pytest.raises(openai.NotFoundError):
                use(file_id)
    for look in (blue.batches.retrieve, blue.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            look(batch.id)
    with pytest.raises(openai.NotFoundError):
        blue.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert not blue.files.list().data
    assert not blue.batches.list().data


def test_message_batches_by_anthropics_client(in_memory: Server) -> None:
    client, other = (anthropic.Anthropic(base_url=in_memory.url, api_key=key, max_retries=0) for key in ("red", "blue"))
    params: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    asked: Any = [{"custom_id": "a", "params": params}, {"custom_id": "b", "params": params | {"model": "none"}}]
    batches = client.messages.batches
    made = [batches.create(requests=asked) for _ in range(2)]
    for batch in made:
        wait_until(lambda id=batch.id: batches.retrieve(id).processing_status == "ended")  # type: ignore[misc]
    assert [each.id for each in batches.list(limit=1)] == [batch.id for batch in reversed(made)], "in pages of one"
    found: dict[str, Any] = {each.custom_id: each.result for each in batches.results(made[0].id)}
    assert {name: result.type for name, result in found.items()} == {"a": "succeeded", "b": "errored"}
    assert found["a"].message.usage.output_tokens == 4
    assert found["b"].error.error.type == "not_found_error"
    counts = batches.retrieve(made[0].id).request_counts
    assert (counts.errored, counts.succeeded, counts.processing) == (1, 1, 0)
    for use in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            use(made[0].id)
    assert batches.delete(made[0].id).type == "message_batch_deleted"
    with pytest.raises(anthropic.BadRequestError, match="another request has the same"):
        batches.create(requests=asked[:1] * 2)


def test_uploads_beyond_the_memory_are_refused_however_they_come(in_memory: Server) -> None:
    url, key = f"{in_memory.url}/v1/files", {"Authorization": "Bearer blue"}
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": b"x" * 2_000_000}}
    assert httpx.post(url, headers=key, **form).status_code == 413

    def endless() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield from (b"x" * 100_000 for _ in range(20))

    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert httpx.post(url, headers=key | kind, content=endless()).status_code == 413
    form = {"data": {"purpose": "batch"}, "files": {"file": b"x" * 600_000}}
    held = httpx.post(url, headers=key, **form)
    assert held.status_code == 200
    full = httpx.post(url, headers=key, **form)
    assert (full.status_code, "--data-memory" in full.text) == (503, True)
    assert httpx.delete(f"{url}/{held.json()['id']}", headers=key).status_code == 200
    assert httpx.post(url, headers=key, **form).status_code == 200


def test_batches_in_memory_are_lost_when_their_server_ends() -> None:
    with serving(*SIMULATED, "--sim-step-ms", "30") as running:
        started(running.client(), *[line(f"r{n}", max_tokens=3000) for n in range(3)])
        running.wait_for_log("are in memory until the server ends")
        running.stop(signal.SIGTERM)
        running.wait_for_log("they are in memory: 1 batches")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_after_its_server_has_ended(tmp_path: Path, how: signal.Signals) -> None:
    """Every line has one result, whatever was under way."""
    count = 300
    flags = (*SIMULATED, "--data-dir", str(tmp_path), "--batch-lines-in-flight", "8")
    with serving(*flags, "--sim-step-ms", "30") as first:
        client = first.client()
        batch_id = started(client, *[line(f"r{n}", max_tokens=10) for n in range(count)])
        wait_until(lambda: (client.batches.retrieve(batch_id).request_counts or 0).completed > 20)  # type: ignore[union-attr]
        first.stop(how)
    with serving(*flags) as second:
        client = second.client()
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert names(results(client, batch.output_file_id)) == [f"r{n}" for n in range(count)]


def test_two_servers_do_not_share_a_folder(server: Server, tmp_path: Path) -> None:
    with serving(*SIMULATED, "--data-dir", str(tmp_path)):
        other = Server(*SIMULATED, "--data-dir", str(tmp_path))
        other.wait_for_log("Another server may be using it")
        assert other.process.wait(30) == 1


@pytest.mark.parametrize(("charset", "status"), [("undefined", 400), ("unicode_escape", 200)])
def test_no_charset_of_a_form_breaks_the_server(server: Server, charset: str, status: int) -> None:
    parts = {"purpose": "batch", 'file"; filename="\\ud800': "{}"}
    fields = [f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in parts.items()]
    headers = {"authorization": "Bearer red", "content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    answer = httpx.post(f"{server.url}/v1/files", content="".join(fields) + "--x--\r\n", headers=headers)
    assert answer.status_code == status, answer.text
