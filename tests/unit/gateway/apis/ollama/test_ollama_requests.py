"""Requests as Ollama's clients send them, by the whole API over a data plane with a simulated model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.dataplane import GenerateRequest, Generation
from penstock.gateway.requests.call import RequestJournal, be_strict
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import ChatTemplate
from protocol.asgi_client import AsgiCall, call
from support.dataplane import Setup

HI = [{"role": "user", "content": "hi"}]
CONTEXT = 256
"""Tokens, which are characters here or fewer."""


class Served:
    """A model, and what it was asked for."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.generated: list[GenerateRequest] = []
        generate = setup.plane.generate

        async def noted(request: GenerateRequest) -> Generation:
            self.generated.append(request)
            return await generate(request)

        setup.plane.generate = noted  # type: ignore[method-assign]

    async def ask(self, path: str, settings: dict[str, Any] | None = None, **fields: Any) -> AsgiCall:
        body = {"model": "m", "stream": False, **fields}
        return await call(build_app(self.setup.plane, AppSettings(**settings or {})), f"/api/{path}", body)

    async def chat(self, *, status: int = 200, ignored: str | None = None, **fields: Any) -> GenerateRequest:
        """What the data plane was asked for. Checks the answer's status, and what it says was ignored."""
        answer = await self.ask("chat", messages=fields.pop("messages", HI), **fields)
        assert (answer.status, answer.headers.get("x-penstock-ignored")) == (status, ignored), answer.json()
        return self.generated[-1]

    def prompt(self) -> str:
        """The text of the newest request's only prompt."""
        [prompt] = self.generated[-1].prompts
        assert isinstance(prompt, list)
        return self.setup.tokenizer.decode(prompt, skip_special_tokens=False)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    setup = Setup(tmp_path, SchedulerConfig(), 256)
    await setup.model.start()
    setup.plane.models.serve(setup.model)
    yield Served(setup)
    await setup.model.stop()


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"top_k": 40.0, "num_predict": 4.0, "seed": 1.0}, {"top_k": 40, "max_tokens": 4, "seed": 1}),
        ({"top_k": 40.7}, {"top_k": 40}),
        ({"seed": 2**60 + 1}, {"seed": 2**60 + 1}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"temperature": 2.5}, {"temperature": 2.5}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"top_p": 1.5, "min_p": -0.5}, {"top_p": 1.0, "min_p": 0.0}),
        ({"presence_penalty": 5, "frequency_penalty": -3}, {"presence_penalty": 5.0, "frequency_penalty": -3.0}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "presence_penalty": 5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"num_predict": -1}, {"max_tokens": 0}),
        ({"num_predict": -2}, {"max_tokens": 0}),
        ({"num_predict": 0}, {"max_tokens": 1}),
        ({"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "penalize_newline": True, "unheard_of": [1]}, {}),
        ({"repeat_last_n": 64}, {}),
        ({"num_ctx": CONTEXT, "num_gpu": None}, {}),
    ],
)
async def test_options_are_followed(served: Served, options: dict[str, Any], params: dict[str, Any]) -> None:
    wanted = (await served.chat(options={"num_predict": 4, **options})).params
    assert {name: getattr(wanted, name) for name in params} == params
    if "repeat_last_n" in options and not options["repeat_last_n"]:
        assert (wanted.presence_penalty, wanted.frequency_penalty) == (0.0, 0.0)


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"options": {"mirostat": 2, "num_predict": 4}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.9, "typical_p": 0.7, "num_predict": 4}}, "options.tfs_z, options.typical_p"),
    ({"options": {"num_gpu": 99, "num_predict": 4}}, "options.num_gpu"),
    ({"options": {"use_mmap": False, "num_thread": 4, "num_predict": 4}}, "options.num_thread, options.use_mmap"),
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1, "num_predict": 4}}, "options.repeat_last_n"),
    ({"options": {"num_ctx": CONTEXT + 1, "num_predict": 4}}, "options.num_ctx"),
    ({"options": {"temperature": 1e300, "num_predict": 4}}, "options.temperature"),
    ({"options": {"num_predict": 4}, "think": True}, "think"),
    ({"options": {"num_predict": 4}, "think": "low"}, "think"),
    ({"options": {"num_predict": 4}, "keep_alive": 0}, "keep_alive"),
    ({"options": {"num_predict": 4}, "keep_alive": "0"}, "keep_alive"),
    ({"options": {"num_predict": 4}, "tools": [{"type": "web_search"}]}, "tools[]"),
    ({"options": {"num_predict": 4}, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[]"),
    ({"options": {"num_predict": 4}, "messages": [{"role": "System", "content": "x"}]}, "messages[].role"),
    ({"options": {"num_predict": 4}, "messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[].tool_name"),
]


@pytest.mark.parametrize(("fields", "names"), HINTS)
async def test_hints_cost_no_request(served: Served, fields: dict[str, Any], names: str) -> None:
    assert (await served.chat(ignored=names, **fields)).params.max_tokens == 4
    strict = await served.ask("chat", {"journal": RequestJournal(on_begin=[be_strict])}, **{"messages": HI, **fields})
    assert (strict.status, list(strict.json())) == (400, ["error"])
    assert len(served.generated) == 1 or "keep_alive" in fields, "what is refused costs no generation"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature: expected"),
        ({"options": {"repeat_penalty": 0}}, "repetition_penalty must be greater than 0"),
        ({"options": {"seed": 2**70}}, "seed must fit in 64 bits"),
        ({"options": {"stop": [""]}}, "stop: a string must not be empty"),
        ({"keep_alive": "soon"}, "keep_alive must be a number of seconds"),
        ({"think": "a little"}, "think: invalid value"),
        ({"format": {"type": "object"}}, "response_format: this model's engine has no structured output"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"top_logprobs": -1}, "top_logprobs must be between 0 and 20"),
    ],
)
async def test_what_is_no_request_is_refused(served: Served, fields: dict[str, Any], said: str) -> None:
    answer = await served.ask("chat", messages=HI, **fields)
    assert answer.status == 400
    assert said in answer.json()["error"]
    assert not served.generated


async def test_a_bound_of_no_tokens_gives_none(served: Served) -> None:
    for stream in (False, True):
        answer = await served.ask("chat", messages=HI, stream=stream, options={"num_predict": 0})
        lines = lines_of(answer)
        assert [line["message"]["content"] for line in lines] == [""]
        assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 0)
        assert lines[-1]["prompt_eval_count"] > 0


async def test_more_tokens_than_the_context_has_are_an_upper_bound(served: Served) -> None:
    answer = await served.ask("chat", messages=HI, options={"num_predict": 10 * CONTEXT})
    body = answer.json()
    assert body["prompt_eval_count"] + body["eval_count"] == CONTEXT
    assert body["done_reason"] == "length"
    raw = await served.ask("generate", prompt="hi", raw=True, options={"num_predict": 10 * CONTEXT})
    assert raw.json()["eval_count"] == CONTEXT - 2


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_durations_are_never_0(served: Served, path: str) -> None:
    body = (await served.ask(path, messages=HI, prompt="hi", options={"num_predict": 3})).json()
    durations = [value for name, value in body.items() if name.endswith("_duration")]
    assert len(durations) == 4
    assert min(durations) > 0, "clients in Go read 0 as if nothing was there"


# Prompts that are too long


def turns(count: int, text: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"<{n}>{text}"} for n in range(count)]


SYSTEM = {"role": "system", "content": "Be kind."}


async def test_the_oldest_turns_are_left_out_but_not_what_the_system_said(served: Served) -> None:
    late = {"role": "system", "content": "Be brief."}
    messages = [SYSTEM, *turns(20, "x" * 20), late, *turns(7, "y" * 10)]
    wanted = await served.chat(messages=messages, options={"num_predict": 4}, ignored="messages")
    text = served.prompt()
    assert text.startswith("system: Be kind.\n")
    assert text.endswith("user: <6>yyyyyyyyyy\n")
    assert "system: Be brief.\n" in text
    kept = text.removeprefix("system: Be kind.\n").removeprefix("system: Be brief.\n")
    assert kept.startswith("user: <"), "a conversation begins with its user"
    [prompt] = wanted.prompts
    longer = len("user: <10>xxxxxxxxxxxxxxxxxxxx\nassistant: <11>xxxxxxxxxxxxxxxxxxxx\n")
    assert CONTEXT - 4 - longer < len(prompt) <= CONTEXT - 4, "as much stays as fits beside the answer"


async def test_a_prompt_that_fits_stays_whole(served: Served) -> None:
    messages = [{"role": "user", "content": "a" * 20}, *turns(3, "x" * 20)]
    await served.chat(messages=messages, options={"num_predict": 200})
    assert served.prompt().startswith("user: aaaa")


async def test_a_smaller_context_cuts_more(served: Served) -> None:
    messages = [SYSTEM, *turns(7, "x" * 10)]
    whole = only(await served.chat(messages=messages, options={"num_predict": 4}))
    wanted = await served.chat(messages=messages, options={"num_predict": 4, "num_ctx": 80}, ignored="messages")
    [prompt] = wanted.prompts
    assert len(whole) > 80 >= len(prompt) > 40
    assert served.prompt().startswith("system: Be kind.\nuser: <")
    assert served.prompt().endswith("<6>xxxxxxxxxx\n")


async def test_a_result_of_a_tool_is_not_parted_from_its_call(served: Served) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    steps = [message for n in range(12) for message in (called, {"role": "tool", "content": f"{n:02}" + "r" * 30})]
    await served.chat(messages=[SYSTEM, *HI, *steps], options={"num_predict": 4}, ignored="messages")
    kept = served.prompt().removeprefix("system: Be kind.\n")
    assert kept.startswith("assistant: \n")
    assert kept.endswith("tool: 11" + "r" * 30 + "\n")


@pytest.mark.parametrize(
    ("options", "begins"), [({}, "user"), ({"num_keep": 12}, "user: <start"), ({"num_keep": 0}, "x")]
)
async def test_a_message_that_is_too_long_by_itself_is_cut(
    served: Served, options: dict[str, Any], begins: str
) -> None:
    content = "<start>" + "x" * 500 + "<end>"
    messages = [*turns(3, "old"), {"role": "user", "content": content}]
    wanted = await served.chat(messages=messages, options={"num_predict": 4, **options}, ignored="messages")
    [prompt] = wanted.prompts
    assert len(prompt) == CONTEXT - 4
    assert served.prompt().startswith(begins)
    assert served.prompt().endswith("xxx<end>\n")


async def test_where_the_answer_has_no_length_a_part_of_the_context_is_left_for_it(served: Served) -> None:
    for predicted, left in ((None, CONTEXT // 4), (-1, CONTEXT // 4), (10 * CONTEXT, CONTEXT // 2)):
        options = {} if predicted is None else {"num_predict": predicted}
        await served.chat(messages=[{"role": "user", "content": "x" * 999}], options=options, ignored="messages")
        [prompt] = served.generated[-1].prompts
        assert len(prompt) == CONTEXT - left


@pytest.mark.parametrize("fields", [{}, {"raw": True}])
async def test_a_prompt_of_generate_is_cut_in_the_same_way(served: Served, fields: dict[str, Any]) -> None:
    options = {"num_predict": 4, "num_keep": 9}
    answer = await served.ask("generate", prompt="<start>" + "x" * 500 + "<end>", options=options, **fields)
    assert answer.status == 200
    assert answer.json()["prompt_eval_count"] == CONTEXT - 4
    assert "<end>" in served.prompt()
    assert ("<start>" in served.prompt()) is bool(fields), "nine tokens hold it only without a template before it"
    assert answer.headers["x-penstock-ignored"] == ("prompt" if fields else "messages")


@pytest.mark.parametrize(
    "fields", [{"messages": turns(99, "x")}, {"prompt": "x" * 999}, {"prompt": "x" * 999, "raw": True}]
)
async def test_truncate_false_refuses_it(served: Served, fields: dict[str, Any]) -> None:
    path = "chat" if "messages" in fields else "generate"
    answer = await served.ask(path, truncate=False, **fields)
    assert answer.status == 400
    assert "truncate" in answer.json()["error"]
    short = await served.ask(path, truncate=False, options={"num_predict": 2}, messages=HI, prompt="hi")
    assert short.status == 200
    named = await served.ask(path, truncate=False, options={"num_ctx": 4}, messages=HI, prompt="hello there")
    assert named.status == 400
    assert "more than 4 tokens" in named.json()["error"]


async def test_few_renderings_find_what_fits_among_many_messages(served: Served) -> None:
    rendered: list[int] = []
    chat_prompt = served.setup.plane.chat_prompt

    async def noted(model: str, messages: Any, *about: Any, **more: Any) -> Any:
        rendered.append(len(messages))
        return await chat_prompt(model, messages, *about, **more)

    served.setup.plane.chat_prompt = noted  # type: ignore[method-assign]
    await served.chat(messages=turns(9_999, "some words"), options={"num_predict": 4}, ignored="messages")
    assert len(rendered) <= 9
    assert served.prompt().endswith("<9998>some words\n")
    assert len(only(served.generated[-1])) > CONTEXT - 80


def lines_of(answer: AsgiCall) -> list[Any]:
    return [json.loads(line) for line in b"".join(answer.bodies).splitlines()]


def only(wanted: GenerateRequest) -> list[int]:
    [prompt] = wanted.prompts
    assert isinstance(prompt, list)
    return prompt


# Prompts


async def test_an_answers_context_goes_before_the_next_prompt(served: Served) -> None:
    first = (await served.ask("generate", prompt="one", options={"num_predict": 3})).json()
    assert first["context"][: first["prompt_eval_count"]] == only(served.generated[-1])
    assert len(first["context"]) == first["prompt_eval_count"] + 3
    answer = await served.ask("generate", prompt="two", context=first["context"], options={"num_predict": 3})
    assert answer.status == 200
    begun = only(served.generated[-1])
    assert begun[: len(first["context"])] == first["context"]
    assert served.setup.tokenizer.decode(begun[len(first["context"]) :], skip_special_tokens=False) == "user: two\n"
    streamed = await served.ask("generate", prompt="one", stream=True, options={"num_predict": 3})
    assert lines_of(streamed)[-1]["context"] == first["context"]


async def test_the_token_that_opens_a_text_is_not_repeated_within_it(served: Served) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    served.setup.model.chat_template = ChatTemplate(source, served.setup.tokenizer.special_tokens)
    first = (await served.ask("generate", prompt="one", options={"num_predict": 1})).json()
    assert served.prompt() == "<s>one"
    await served.ask("generate", prompt="two", context=first["context"], options={"num_predict": 1})
    assert served.prompt().count("<s>") == 1
    assert served.prompt().endswith("two")


async def test_a_context_that_is_too_long_is_cut_and_one_of_other_tokens_refused(served: Served) -> None:
    long = await served.ask("generate", prompt="end", context=[20] * 400, options={"num_predict": 3})
    assert (long.status, long.headers["x-penstock-ignored"]) == (200, "context")
    assert served.prompt().endswith("user: end\n")
    for context in ([10**6], [-1]):
        wrong = await served.ask("generate", prompt="end", context=context)
        assert wrong.status == 400
        assert "oken ids" in wrong.json()["error"]


async def test_templates_that_say_what_this_server_does(served: Served) -> None:
    template = served.setup.model.chat_template
    assert template is not None
    for given, prompt in (
        (template.source, "user: hi\n"),
        ("{{ .Prompt }}", "hi"),
        ("{{.Prompt}}\n", "hi"),
        ("", "user: hi\n"),
    ):
        answer = await served.ask("generate", prompt="hi", template=given, options={"num_predict": 2})
        assert answer.status == 200
        assert served.prompt() == prompt
    other = await served.ask("generate", prompt="hi", template="[INST] {{ .Prompt }} [/INST]")
    assert other.status == 400
    assert "template" in other.json()["error"]


@pytest.mark.parametrize("fields", [{"system": "s"}, {"context": [20]}, {"template": "{{ .Prompt }}"}])
async def test_a_raw_prompt_is_all_that_the_model_reads(served: Served, fields: dict[str, Any]) -> None:
    answer = await served.ask("generate", prompt="hi", raw=True, **fields)
    assert answer.status == 400
    assert answer.json()["error"].startswith("raw: ")


async def test_images_leave_a_line_in_a_prompt(served: Served) -> None:
    answer = await served.ask("generate", prompt="look", images=["aGk="], options={"num_predict": 2})
    assert (answer.status, answer.headers["x-penstock-ignored"]) == (200, "images")
    assert "image" in served.prompt()


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_a_request_without_a_prompt_loads_the_model(served: Served, path: str) -> None:
    for fields in ({}, {"messages": None, "prompt": None}, {"keep_alive": 0}):
        body = (await served.ask(path, **fields)).json()
        assert (body["done"], body["done_reason"]) == (True, "load"), "it stays, whatever keep_alive says"


async def test_a_model_without_a_chat_template_reads_the_prompt_alone(served: Served) -> None:
    served.setup.model.chat_template = None
    answer = await served.ask("generate", prompt="hi", system="Be kind.", options={"num_predict": 2})
    assert (answer.status, answer.headers["x-penstock-ignored"]) == (200, "system")
    assert served.prompt() == "hi"
    assert answer.json()["context"][:-2] == only(served.generated[-1])
