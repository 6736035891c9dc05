"""A newcomer's first minutes: the demo model, curl and the openai SDK, against a real server process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import Tokenizer
from support.server import Server, block, serving, wait_until

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # each step a frame of its own: a quick machine has the whole answer within a few of the default intervals
    with serving("--stream-interval-ms", "0") as running:
        yield running


def test_the_readme_s_curl_streams_an_answer(server):
    command = block("sh", "/v1/chat/completions").replace("http://127.0.0.1:8000", server.url)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert printed.count("data: {") >= 2  # the role, then the answer; on a busy machine all steps may leave together
    assert printed.rstrip().endswith("data: [DONE]")


def test_the_readme_s_python_prints_an_answer(server, capsys):
    code = block("python", "openai")
    exec(code.replace("http://127.0.0.1:8000", server.url), {})  # noqa: S102  # the README is ours
    answer = capsys.readouterr().out
    assert "path" in answer
    assert len(answer.split()) > 5


def test_it_stops_by_itself(server):
    answer = server.client().chat.completions.create(model="penstock-demo", messages=QUESTION)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_and_whole_answers_are_the_same(server):
    request = {"model": "penstock-demo", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    client = server.client()
    whole = client.chat.completions.create(**request).choices[0].message.content
    parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**request, stream=True)]
    assert "".join(parts) == whole


def test_a_seed_repeats_itself_and_samples_differ(server):
    request = {
        "model": "penstock-demo",
        "messages": QUESTION,
        "temperature": 1.5,
        "top_p": 1,
        "max_tokens": 24,
        "n": 3,
        "seed": 5,
    }
    client = server.client()
    first, second = ([c.message.content for c in client.chat.completions.create(**request).choices] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_logprobs_fit_the_answer(server):
    answer = server.client().chat.completions.create(
        model="penstock-demo", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)


def test_a_stop_string_ends_the_answer_before_itself(server):
    client = server.client()
    request = {"model": "penstock-demo", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**request).choices[0].message.content
    stop = whole[10:14]
    cut = client.chat.completions.create(**request, stop=stop)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    parts = [
        c.choices[0].delta.content or "" for c in client.chat.completions.create(**request, stop=stop, stream=True)
    ]
    assert "".join(parts) == whole[: whole.index(stop)]
    wait_until(lambda: server.state()["num_running"] == 0)


def test_completions_of_several_prompts_in_text_and_ids(server):
    client = server.client()
    answer = client.completions.create(
        model="penstock-demo", prompt=["def f(", "import "], max_tokens=4, echo=True, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:6] for choice in answer.choices] == ["def f(", "def f(", "import", "import"]
    by_ids = client.completions.create(model="penstock-demo", prompt=[[10, 11, 12]], max_tokens=4)
    assert by_ids.usage.prompt_tokens == 3


def test_echo_of_token_ids_spells_the_prompt(server):
    client = server.client()
    request = {"model": "penstock-demo", "max_tokens": 0, "echo": True, "logprobs": 0}
    by_text = client.completions.create(prompt="import os.path", **request).choices[0]
    by_ids = client.completions.create(prompt=[_ids(by_text.logprobs.tokens)], **request).choices[0]
    assert by_ids.text == "import os.path"
    assert by_ids.logprobs.tokens == by_text.logprobs.tokens
    assert by_ids.logprobs.token_logprobs == by_text.logprobs.token_logprobs


def _ids(tokens: list[str]) -> list[int]:
    tokenizer = Tokenizer(find_model(None).folder)
    return [token_id for token in tokens for token_id in tokenizer.encode(token)]


def test_echo_with_logprobs_scores_the_prompt(server):
    answer = server.client().completions.create(
        model="penstock-demo", prompt="import os", max_tokens=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == "import os"
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_the_second_time_the_prompt_comes_from_the_cache(server):
    request = {"model": "penstock-demo", "prompt": [list(range(20, 120))], "max_tokens": 1}
    client = server.client()
    client.completions.create(**request)
    again = client.completions.create(**request)
    assert again.usage.prompt_tokens_details.cached_tokens >= 96


def test_errors_have_the_sdk_s_types(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="absent", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="penstock-demo", messages=QUESTION, temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="penstock-demo", prompt=[[5] * 3000], max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"
    for text in ("0123456789" * 100_000, "letters" * 100_000, "Some words. " * 100_000):
        with pytest.raises(openai.BadRequestError, match="your prompt has more than 2047 tokens") as too_long:
            client.chat.completions.create(model="penstock-demo", messages=[{"role": "user", "content": text}])
        assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="penstock-demo", messages=QUESTION, extra_body={"use_beam_search": True})
    assert unsupported.value.code == "unsupported_parameter"


def test_models_and_version(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["penstock-demo"]
    found = client.models.retrieve("penstock-demo").to_dict()
    assert found["capabilities"] == ["completion", "chat", "tools", "structured_output"]
    assert httpx.get(server.url + "/version").json()["version"]


def test_neither_process_has_loaded_torch(server):
    for pid in (server.process.pid, server.engine_pid()):
        with open(f"/proc/{pid}/maps") as maps:
            assert "torch" not in maps.read()


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_it_calls_a_tool_by_itself_and_says_what_came_back(server):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": "penstock-demo", "temperature": 0, "tools": [WEATHER]}
    first = server.client().chat.completions.create(messages=messages, **asked).choices[0]
    [call] = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7}'}]
    answer = server.client().chat.completions.create(messages=messages, **asked).choices[0].message
    assert answer.tool_calls is None
    assert "7" in answer.content


def test_anthropic_s_tool_runner_sends_the_conversation_itself(server):
    """It first asks for a thread, a conversation that the server would keep."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f'{{"temperature": {len(city) + 3}}}'

    question = {"role": "user", "content": "What is the weather in Oslo?"}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="penstock-demo",
            max_tokens=64,
            messages=[question],
            tools=[get_weather],
            max_iterations=3,
            extra_body={"temperature": 0},
        )
        called, answer = list(runner)
    assert [block.type for block in called.content] == ["tool_use"]
    assert "7" in answer.content[0].text


def test_it_calls_no_tool_where_none_is_needed(server):
    request = {"model": "penstock-demo", "temperature": 0, "messages": QUESTION}
    plain = server.client().chat.completions.create(**request).choices[0].message
    assert server.client().chat.completions.create(**request, tools=[WEATHER]).choices[0].message == plain


def test_it_answers_in_json_when_asked(server):
    question = "Extract name and age as JSON: Anna is 31 years old."
    answer = server.client().chat.completions.create(
        model="penstock-demo", temperature=0, messages=[{"role": "user", "content": question}]
    )
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 31}
