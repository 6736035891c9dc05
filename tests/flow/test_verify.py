"""`penstock verify` finds what is wrong with a checkpoint, and nothing wrong with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.cli import main
from penstock.gateway.commands.verify import number_checks
from penstock.gateway.commands.verify.answer_checks import check_answers, check_json, check_tools
from penstock.gateway.commands.verify.number_checks import check_losses, check_tokens, compare, exact
from penstock.gateway.commands.verify.reference import load_reference
from penstock.gateway.commands.verify.report import Row
from penstock.gateway.commands.verify.subject import Subject
from penstock.gateway.commands.verify.text_checks import check_end_tokens, check_template, check_tokenizer
from penstock.gateway.configuration.config import load_config
from support.cpu import own_cache
from support.verify import (
    DEMO,
    ORDINARY_TOKEN,
    Fault,
    as_gguf,
    as_gptq,
    swapped_tensors,
    whole,
    wrong_end_token,
    wrong_special_token,
    wrong_template,
)


@pytest.fixture(scope="module", autouse=True)
def no_settings_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", own_cache(tmp_path_factory.mktemp("cache")))
        yield


def subject_of(model: Path, **settings: Any) -> Subject:
    return Subject(load_config({"model": str(model), **settings}, environ={}))


def test_the_demo_model_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["check"]: row for row in report["rows"]}
    assert list(rows)[:3] == ["chat template", "end tokens", "answers"]
    assert {name for name, row in rows.items() if row["result"] != "pass"} == {"greedy tokens", "speed"}
    assert rows["end tokens"]["figures"]["end_tokens"] == {"0": "<|endoftext|>", "2": "<|im_end|>"}
    assert rows["JSON"]["figures"]["wrong"] == {}
    assert report["model"] == "penstock-demo"


def test_a_broken_model_ends_with_1_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", "--quick", str(wrong_end_token(tmp_path / "broken"))]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("broken does not work here: ")
    assert "end tokens" in last
    assert "answers" in last


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_of_the_demo_model_work(weights: str) -> None:
    with subject_of(DEMO, weights=weights) as subject:
        assert check_losses(subject).result == check_answers(subject, quick=True).result == "pass"


FORMATS = ("folder", "gguf", "gptq")


def write(make: Fault, kind: str, folder: Path) -> Path:
    if kind == "gptq":
        return as_gptq(make, folder)
    if kind == "folder":
        return make(folder)
    ends = {"tokenizer__ggml__eos_token_id": ORDINARY_TOKEN} if make is wrong_end_token else {}
    return as_gguf(make, folder, **ends)


@pytest.mark.parametrize("kind", FORMATS)
class TestFaults:
    """In each format."""

    def test_nothing_is_found_in_a_whole_model(self, kind: str, tmp_path: Path) -> None:
        with subject_of(write(whole, kind, tmp_path / "model")) as subject:
            for row in (
                *(check(subject) for check in (check_template, check_end_tokens, check_tokenizer, check_losses)),
                *(check(subject, quick=True) for check in (check_answers, check_json)),
            ):
                assert row.result == "pass", row

    def test_a_wrong_end_token(self, kind: str, tmp_path: Path) -> None:
        with subject_of(write(wrong_end_token, kind, tmp_path / "model")) as subject:
            row = check_end_tokens(subject)
        assert row.result == "FAIL"
        assert "'#' (5) is ordinary text" in row.detail

    def test_another_model_s_template(self, kind: str, tmp_path: Path) -> None:
        with subject_of(write(wrong_template, kind, tmp_path / "model")) as subject:
            template, ends = check_template(subject), check_end_tokens(subject)
        assert template.result == ends.result == "FAIL"
        assert "it is another model's: it writes <|end_header_id|>, <|eot_id|>" in template.detail
        assert "the template ends answers with '<|eot_id|>', which is none of" in ends.detail

    def test_swapped_tensors(self, kind: str, tmp_path: Path) -> None:
        with subject_of(write(swapped_tensors, kind, tmp_path / "model")) as subject:
            text, answers = check_losses(subject), check_answers(subject, quick=True)
        assert text.result == answers.result == "FAIL"
        assert min(text.figures["shares_of_chance"].values()) > 0.9


def test_turns_that_end_with_another_special_token(tmp_path: Path) -> None:
    with subject_of(wrong_special_token(tmp_path / "model")) as subject:
        row = check_end_tokens(subject)
    assert row.result == "FAIL"
    assert row.figures["end_tokens"] == {0: "<|endoftext|>"}
    assert row.figures["turn_ends_with"] == "<|im_end|>\n"


INST = "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' + eos_token }}{% endfor %}"
WITHOUT_OPENING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + WITHOUT_OPENING
)
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOSING = (
    "{{ '<|im_start|>' + messages[-1]['role'] + '\n' + messages[-1]['content'] + '<|im_end|>\n' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "result", "words"),
    [
        (INST, "warn", "it does not write <|im_start|>"),
        (WITHOUT_OPENING, "warn", "it begins answers in a history with '<|im_start|>assistant'"),
        (WITHOUT_SYSTEM + OPENING, "pass", "the template default insists on no system message"),
        (LOSING, "FAIL", "with several turns, leaves out 2 of 3 texts"),
        ("{{ messages[0]['content'].lower().strip() + none }}", "FAIL", "fails with a question"),
    ],
)
def test_a_template_that_loses_text_or_fails_is_told_from_an_odd_one(
    template: str, result: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    with subject_of(DEMO, chat_template=str(file)) as subject:
        row = check_template(subject)
    assert (row.result, words in row.detail) == (result, True), row.detail


def test_weights_that_transformers_has_otherwise_are_found(tmp_path: Path) -> None:
    """As when this engine loads them wrong."""
    other = load_reference(swapped_tensors(tmp_path / "model"))
    right = load_reference(DEMO)
    assert not isinstance(other, str)
    assert not isinstance(right, str)
    with Subject(exact(load_config({}, environ={}))) as subject:
        count, same, difference = compare(subject, right.score)
        assert same == count
        assert difference < 1e-3
        _, same, difference = compare(subject, other.score)
    assert same < count / 2
    assert difference > 1


def test_without_transformers_the_engine_is_compared_with_itself_in_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_checks, "find_spec", lambda name: None)
    row = check_tokens(load_config({"weights": "int8"}, environ={}))
    assert row.result == "pass"
    assert "beside this engine in f32 (transformers is not installed)" in row.detail


def test_a_weak_model_s_calls_are_a_warning_and_required_ones_are_valid() -> None:
    """Calls that a grammar makes are found whatever the model knows."""
    with subject_of(DEMO, chat_template_content_format="string") as subject:
        row: Row = check_tools(subject, quick=True)
    assert row.result in ("pass", "warn")
    assert row.figures["required"] == row.figures["required_valid"] > 0


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str]:
        try:
            status = main(["verify", *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        shown = capsys.readouterr()
        assert shown.out == ""
        return status, shown.err.splitlines()[-1]

    return run


def test_what_does_not_load_is_said_in_a_line(refused: Any, tmp_path: Path) -> None:
    status, line = refused(str(tmp_path))
    assert status == 1
    assert line.startswith(f"penstock verify: model: {tmp_path} has no model: neither config.json")
    broken = whole(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x08")
    status, line = refused(str(broken))
    assert status == 1
    assert "model.safetensors" in line


def test_wrong_use_is_refused(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("--engine", "simulated")[0] == 2
    assert refused("--task-limit", "3")[0] == 2
    assert refused("--weights", "int3")[0] == 2
    monkeypatch.setattr("penstock.gateway.commands.verify.command.find_spec", lambda name: None)
    status, line = refused("--tasks", "arc_easy")
    assert status == 2
    assert line.endswith("--tasks needs lm-evaluation-harness, which is not installed: pip install lm_eval")
