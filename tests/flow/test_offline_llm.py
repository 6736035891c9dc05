"""`penstock.LLM`: models in a program, without a server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import LLM
from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    PenstockError,
)
from penstock.gateway.commands.offline.loop_thread import ClosedError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language.dataplane import Generation
from support.adapters import save_adapter
from support.encoders import make_encoder, reference, reference_rows, sentence_files, tokenizer
from support.processes import is_running
from support.server import wait_until

GREEDY = {"temperature": 0.0, "max_tokens": 12}
ASK = [{"role": "user", "content": "What does functools.wraps do?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Basel"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model."""
    with LLM() as found:
        yield found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A step takes 5 ms, two requests run at a time; it has an adapter."""
    adapter = save_adapter(tmp_path_factory.mktemp("adapters") / "one")
    with LLM(engine="simulated", sim_step_ms=5.0, max_num_seqs=2, lora=(f"one={adapter}",)) as found:
        yield found


def engine_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def loops() -> int:
    return sum([thread.name == "penstock-llm" for thread in threading.enumerate()])


class TestGenerate:
    def test_one_text(self, llm: LLM) -> None:
        [answer] = llm.generate("The json module", **GREEDY)
        assert answer.prompt == "The json module"
        [choice] = answer.outputs
        assert choice.text
        assert choice.text == answer.text
        assert len(choice.token_ids) == answer.usage.completion_tokens == 12
        assert choice.finish_reason == "length"
        assert choice.logprobs is None

    def test_several_are_answered_in_their_order(self, llm: LLM) -> None:
        prompts = [f"def add_{number}(" for number in range(40)]
        alone = [llm.generate(prompt, **GREEDY)[0].text for prompt in prompts[:3]]
        answers = llm.generate(prompts, **GREEDY)
        assert [answer.prompt for answer in answers] == prompts
        assert [answer.text for answer in answers[:3]] == alone

    def test_token_ids(self, llm: LLM) -> None:
        ids = llm.generate("import os", **GREEDY)[0].prompt_token_ids
        [text], [one], [first, second] = (
            llm.generate("import os", **GREEDY),
            llm.generate(ids, **GREEDY),
            llm.generate([ids, ids[:1]], **GREEDY),
        )
        assert text.outputs[0].token_ids == one.outputs[0].token_ids == first.outputs[0].token_ids
        assert (one.prompt, second.prompt) == (ids, ids[:1])

    def test_no_prompts_have_no_answers(self, llm: LLM) -> None:
        assert llm.generate([]) == []
        assert llm.chat([]) == []

    def test_three_choices_have_their_logprobs_and_so_has_the_prompt(self, llm: LLM) -> None:
        [answer] = llm.generate("x = ", max_tokens=6, n=3, seed=7, logprobs=2, prompt_logprobs=1)
        assert [choice.index for choice in answer.outputs] == [0, 1, 2]
        logprobs = answer.outputs[0].logprobs or []
        assert [entry.token_id for entry in logprobs] == answer.outputs[0].token_ids
        assert [len(entry.top) for entry in logprobs] == [2] * 6
        assert len(answer.prompt_logprobs or []) == len(answer.prompt_token_ids)

    def test_stop_strings(self, llm: LLM) -> None:
        whole = llm.generate("import os", **GREEDY)[0].text
        [stopped] = llm.generate("import os", stop=[whole[3:6]], **GREEDY)
        assert stopped.text == whole[: whole.index(whole[3:6])]
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", whole[3:6])

    def test_more_than_a_server_would_let_wait(self) -> None:
        with LLM(engine="simulated", max_num_seqs=8, num_kv_blocks=64, max_model_len=64) as llm:
            answers = llm.generate([[10 + number % 50] * 4 for number in range(3000)], max_tokens=2)
        assert [answer.prompt_token_ids[0] for answer in answers] == [10 + number % 50 for number in range(3000)]

    @pytest.mark.parametrize(
        ("given", "pattern"),
        [
            ({"structured_outputs": {"regex": "[0-9]{3}-[ab]"}}, r"[0-9]{3}-[ab]"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, r"yes|no"),
            ({"structured_outputs": {"grammar": 'start: "<" /[a-c]/ ">"'}}, r"<[a-c]>"),
            ({"structured_outputs": {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}}, r'\{"a":1\}'),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["q"]}}}}, r'"q"'),
        ],
    )
    def test_structured_output(self, llm: LLM, given: dict[str, Any], pattern: str) -> None:
        for answer in (llm.generate("An answer:", max_tokens=40, **given), llm.chat(ASK, max_tokens=40, **given)):
            assert re.fullmatch(pattern, answer[0].text)
            assert answer[0].outputs[0].finish_reason == "stop"

    def test_an_adapter_changes_the_answer_and_an_unknown_one_is_refused(self, simulated: LLM) -> None:
        plain, adapted = (simulated.generate("hi", adapter=name, **GREEDY)[0] for name in (None, "one"))
        assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids
        with pytest.raises(ModelNotFoundError):
            simulated.generate("hi", adapter="two")


class TestChat:
    def test_one_and_several_conversations(self, llm: LLM) -> None:
        [alone] = llm.chat(ASK, **GREEDY)
        other = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a set?"}]
        first, second = llm.chat([ASK, other], **GREEDY)
        assert alone.prompt is None
        assert alone.outputs[0].message == {"role": "assistant", "content": alone.text}
        assert first.text == alone.text != second.text

    def test_the_message_goes_into_the_next_turn(self, llm: LLM) -> None:
        [first] = llm.chat(ASK, **GREEDY)
        [second] = llm.chat([*ASK, first.outputs[0].message, {"role": "user", "content": "And so?"}], **GREEDY)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens

    def test_logprobs_are_a_number(self, llm: LLM) -> None:
        [answer] = llm.chat(ASK, logprobs=3, **GREEDY)
        assert [len(entry.top) for entry in answer.outputs[0].logprobs or []] == [3] * 12
        with pytest.raises(InvalidRequestError, match="Expected `int`, got `bool`"):
            llm.chat(ASK, logprobs=True)

    def test_a_required_tool_is_called_with_arguments_of_its_schema(self, llm: LLM) -> None:
        fields: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "temperature": 0.0, "max_tokens": 60}
        [answer] = llm.chat(ASK, tool_choice="required", **fields)
        [call] = answer.outputs[0].message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Basel")
        assert answer.outputs[0].finish_reason == "tool_calls"
        [named] = llm.chat(ASK, tool_choice={"type": "function", "function": {"name": "weather"}}, **fields)
        assert named.outputs[0].finish_reason == "stop"


class TestStreams:
    def test_are_the_same_text_piece_by_piece(self, llm: LLM) -> None:
        [whole] = llm.generate("import re", **GREEDY)
        deltas = list(llm.stream("import re", **GREEDY))
        assert "".join([delta.text for delta in deltas]) == whole.text
        assert deltas[-1].finish_reason == "length"
        [spoken] = llm.chat(ASK, **GREEDY)
        assert "".join([delta.text for delta in llm.stream_chat(ASK, **GREEDY)]) == spoken.text

    def test_what_is_refused_is_refused_before_the_stream(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="top_p"):
            llm.stream("a", top_p=2.0)
        with pytest.raises(InvalidRequestError, match="A stream takes one prompt, not 2"):
            llm.stream(["a", "b"])

    @pytest.mark.parametrize("how", ["close", "with", "forget"])
    def test_one_that_is_left_early_is_aborted(self, simulated: LLM, how: str) -> None:
        engine = simulated._host.engine
        stream = simulated.stream("hi", max_tokens=2000, ignore_eos=True)
        assert next(stream).text
        if how == "close":
            stream.close()
            assert next(stream, None) is None
        elif how == "with":
            with stream:
                pass
        del stream
        wait_until(lambda: engine.stats.num_running == 0 and engine.stats.num_waiting == 0)
        assert engine.stats.num_free_blocks == engine.stats.num_blocks

    def test_keeps_its_llm(self) -> None:
        stream = LLM(engine="simulated").stream("hi", max_tokens=20, ignore_eos=True)
        assert sum([len(delta.token_ids) for delta in stream]) == 20


class TestEmbed:
    def test_rows_are_those_of_the_reference_in_the_order_of_the_texts(self, tmp_path: Path) -> None:
        folder = make_encoder(tmp_path, files=sentence_files())
        texts = [f"a quick brown fox {'rain ' * (number % 7)}" for number in range(600)]
        with LLM(folder) as llm:
            rows = llm.embed(texts)
            [one] = llm.embed(texts[0])
            with pytest.raises(InvalidRequestError, match="generates no text; use embed"):
                llm.generate("a")
            with pytest.raises(InvalidRequestError, match="texts must not be empty"):
                llm.embed([])
            with pytest.raises(InvalidRequestError, match="dimensions"):
                llm.embed("a", dimensions=500)
            with pytest.raises(TypeError, match=r"embed\(\) has no parameter 'encoding_format'"):
                llm.embed("a", encoding_format="float")
        encode = tokenizer()
        expected = reference_rows(reference(folder), [TokenizedText(encode(text)["input_ids"]) for text in texts[:7]])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert rows.shape == (600, 32)
        np.testing.assert_allclose(rows[:7], expected, atol=1e-4)
        np.testing.assert_allclose(rows[593:], rows[5:12], atol=1e-5)
        np.testing.assert_allclose(one, rows[0], atol=1e-5)

    def test_a_model_that_generates_has_none(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="gives no embeddings"):
            llm.embed("a")


class TestErrors:
    def test_options_of_servers_and_bad_values_are_refused_by_name(self, tmp_path: Path) -> None:
        for server_s in ("http_port", "api_key", "max_queued_requests", "lora_directory"):
            with pytest.raises(TypeError, match=f"LLM has no option '{server_s}'"):
                LLM(engine="simulated", **{server_s: 1})
        with pytest.raises(ConfigError, match="max_num_seqs"):
            LLM(engine="simulated", max_num_seqs=0)
        with pytest.raises(ConfigError, match="there is no folder or file"):
            LLM(tmp_path / "nothing")

    def test_one_that_cannot_be_loaded_leaves_nothing(self) -> None:
        before = engine_pids(), loops()
        with pytest.raises(PenstockError):
            LLM(max_model_len=1_000_000)
        assert (engine_pids(), loops()) == before

    @pytest.mark.parametrize(
        ("parameters", "kind", "message"),
        [
            ({"top_q": 1}, TypeError, r"generate\(\) has no parameter 'top_q'"),
            ({"stream": True}, TypeError, r"generate\(\) has no parameter 'stream'"),
            ({"temperature": "warm"}, InvalidRequestError, "Expected `float"),
            ({"temperature": 3.0}, InvalidRequestError, "temperature must be between 0 and 2"),
            ({"structured_outputs": {"regex": "["}}, InvalidRequestError, "regular expression cannot be compiled"),
        ],
    )
    def test_wrong_parameters_are_refused_by_name(
        self, llm: LLM, parameters: dict[str, Any], kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            llm.generate("a", **parameters)

    def test_the_first_one_ends_the_call_and_not_the_llm(self, simulated: LLM) -> None:
        engine = simulated._host.engine
        with pytest.raises(ContextLengthError):
            simulated.generate([[10] * 4, [10] * 100_000, *[[10] * 4] * 20], max_tokens=500)
        wait_until(lambda: engine.stats.num_running == 0 and engine.stats.num_waiting == 0)
        assert simulated.generate("hi", **GREEDY)[0].text

    @pytest.mark.parametrize("prompts", [3, None, ["a", [1]], [1.5], b"a", {"a": 1}])
    def test_prompts_are_texts_or_token_ids_and_nothing_else(self, llm: LLM, prompts: Any) -> None:
        if prompts == ["a", [1]]:  # as they are answered one by one, kinds may be mixed
            assert len(llm.generate(prompts, **GREEDY)) == 2
            return
        with pytest.raises(InvalidRequestError):
            llm.generate(prompts)

    def test_messages_of_no_chat_are_refused(self, llm: LLM) -> None:
        for messages in ("hello", [{"role": "a wizard", "content": "a"}], [["a"]], [[]]):
            with pytest.raises(InvalidRequestError):
                llm.chat(messages)  # type: ignore[arg-type]


class TestLife:
    async def test_where_a_loop_runs(self, llm: LLM) -> None:
        """As in a notebook."""
        assert llm.generate("a", **GREEDY)[0].text
        assert list(llm.stream("a", **GREEDY))

    def test_several_threads(self, llm: LLM) -> None:
        alone = llm.generate("def f(", **GREEDY)[0].text
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda: found.append(llm.generate("def f(", **GREEDY)[0].text)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [alone] * 8

    def test_no_port_and_one_process_that_ends(self) -> None:
        before = engine_pids(), loops()
        llm = LLM(engine="simulated")
        [pid] = engine_pids() - before[0]
        for process in (psutil.Process(), psutil.Process(pid)):
            assert not [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
        llm.close()
        assert not is_running(pid)
        assert loops() == before[1]
        llm.close()
        with pytest.raises(ClosedError):
            llm.generate("a")

    def test_a_call_under_way_hears_that_it_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, ends = threading.Event(), []
        begin = Generation.begin

        async def noticed(generation: Generation) -> Generation:
            begun.set()
            return await begin(generation)

        monkeypatch.setattr(Generation, "begin", noticed)
        llm = LLM(engine="simulated", sim_step_ms=5.0)

        def ask() -> None:
            try:
                llm.generate("a", max_tokens=2000, ignore_eos=True)
            except (ClosedError, PenstockError) as error:
                ends.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(20)
        llm.close()
        thread.join(20)
        assert len(ends) == 1


def run_program(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


PROGRAM = """
import psutil
from penstock import LLM
llm = LLM(engine="simulated", sim_step_ms=5.0)
stream = llm.stream("a", max_tokens=2000, ignore_eos=True)
next(stream)
print(*[child.pid for child in psutil.Process().children()], flush=True)
"""


def test_a_program_need_not_close_it() -> None:
    program = run_program(PROGRAM)
    out, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (0, "")
    wait_until(lambda: not is_running(int(out)))


def test_ctrl_c_ends_a_call() -> None:
    program = run_program(PROGRAM + 'llm.generate("a", max_tokens=3000, n=8, ignore_eos=True)')
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors.splitlines()
    wait_until(lambda: not is_running(pid))


def test_a_fork_is_told_that_it_is_not_its_own() -> None:
    """Its thread is not there, so it would wait for ever."""
    program = run_program(
        "import os\nfrom penstock import LLM\nllm = LLM(engine='simulated')\nif not os.fork():\n"
        "    try: llm.generate('a')\n    except Exception as error: print(type(error).__name__, flush=True)\n"
        "    llm.close()\n    os._exit(0)\nos.wait()\nprint(len(llm.generate('a')))"
    )
    out, errors = program.communicate(timeout=60)
    assert (out.split(), errors) == (["ClosedError", "1"], "")


def test_sleep_wake_up_and_an_empty_prefix_cache() -> None:
    with LLM() as llm:
        prompt = "def add(a, b): " * 20
        [before] = llm.generate(prompt, max_tokens=4, temperature=0.0)
        llm.reset_prefix_cache()
        llm.sleep()
        with pytest.raises(NotReadyError, match="sleeps"):
            llm.generate(prompt)
        llm.wake_up()
        assert llm.generate(prompt, max_tokens=4, temperature=0.0)[0].text == before.text
        with pytest.raises(InvalidRequestError, match="level"):
            llm.sleep(level=3)
