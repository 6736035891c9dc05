"""Tasks of lm-evaluation-harness, beside its own backend of transformers, on the demo model. `.ci/real_weights`
installs it; elsewhere this is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.cli import main
from penstock.gateway.models.language.models import find_model

lm_eval = pytest.importorskip("lm_eval")

DOCUMENTS = (
    {"question": "Which module reads JSON?", "choices": [" json", " banana", " turtle"], "label": 0},
    {"question": "Which function sorts a list?", "choices": [" purple", " sorted", " os.path.join"], "label": 1},
    {"question": "What does os.path.join join?", "choices": [" colours", " path components", " years"], "label": 1},
)
KINDS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
    "tiny_generation": {
        "output_type": "generate_until",
        "doc_to_text": "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[0]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
    }
    for name, kind in KINDS.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    return tmp_path


def test_figures_are_those_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ["--tasks", ",".join(KINDS), "--task-folder", str(folder)]
    assert main(["verify", "--quick", "--json", "--dtype", "f32", *tasks]) == 0
    found = {row["check"]: row for row in json.loads(capsys.readouterr().out)["rows"]}["tasks"]["figures"]["results"]
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(find_model(None).folder), "dtype": "float32", "device": "cpu"},
        tasks=list(KINDS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
    )["results"]
    for task, metric in (
        ("tiny_choice", "acc"),
        ("tiny_generation", "exact_match"),
        ("tiny_perplexity", "bits_per_byte"),
    ):
        value = expected[task][f"{metric},none"]
        assert found[task][f"{metric},none"] == pytest.approx(value, rel=1e-4)


def test_an_unknown_task_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--tasks", "no_such_task"]) == 1
    assert "has no task no_such_task" in capsys.readouterr().err
