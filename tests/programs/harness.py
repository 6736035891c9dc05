"""lm-evaluation-harness (`lm_eval`), over the chat completions and the completions API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kit import KEY, Place, check, main, server

VERSION = "0.4.13"
NAMES = ("join", "split", "exists", "isdir")
TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
}
STOPS = ["\n\n", "Question:", "</s>", "User:", "###"]
"""More than four, as tasks of code have."""


def install(place: Place) -> None:
    place.pip(f"lm_eval[api]=={VERSION}")


def write_tasks(place: Place) -> None:
    documents = [{"question": f"What does os.path.{name} do?", "answer": f"os.path.{name}"} for name in NAMES]
    (place.work / "questions.jsonl").write_text("\n".join(map(json.dumps, documents)))
    until = {"until": STOPS, "max_gen_toks": 60, "do_sample": False}
    tasks: list[dict[str, Any]] = [
        {
            "task": "answers",
            "output_type": "generate_until",
            "generation_kwargs": until,
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_choice": ["a path", "{{answer}}"],
            "doc_to_target": 1,
            "metric_list": [{"metric": "acc"}],
        },
    ]
    for task in tasks:
        (place.work / f"{task['task']}.yaml").write_text(json.dumps(TASK | task))


def converse(place: Place) -> Iterator[str]:
    write_tasks(place)
    with server("penstock-demo") as running:

        def evaluate(model: str, route: str, tasks: str, *flags: str, more: str = "") -> int:
            arguments = f"model=penstock-demo,base_url={running.url}/v1/{route},num_concurrent=2{more}"
            command = ("run", "--model", model, "--model_args", arguments, "--tasks", tasks, "--include_path", ".")
            saved = ("--output_path", model, "--log_samples")
            place.run("lm_eval", *command, *saved, *flags, OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1")
            return sum(len(file.read_text().splitlines()) for file in place.work.glob(f"{model}/**/samples_*.jsonl"))

        count = evaluate("local-chat-completions", "chat/completions", "answers", "--apply_chat_template")
        check(count == len(NAMES), "every chat is evaluated", count)
        yield "answers of chats"
        count = evaluate("local-completions", "completions", "answers,choices", more=",tokenizer_backend=remote")
        check(count == 2 * len(NAMES), "every document is evaluated", count)
        yield "answers that end at five stop strings, and log-likelihoods, of completions, with the server's tokenizer"


if __name__ == "__main__":
    main(f"lm_eval {VERSION}", install, converse)
