"""Tasks of lm-evaluation-harness, run with the engine that is checked. The only module that knows the package."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import msgspec
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from penstock.gateway.commands.verify.report import Notes, Row
from penstock.gateway.commands.verify.subject import Subject
from penstock.gateway.configuration.config import ConfigError

_TOGETHER = 64
"""Requests in one call of the engine: a bound on the logprobs that are held."""
_ANSWER_TOKENS = 256
"""Where a task does not say how long answers may be; as in the harness's own models."""


class Tasks:
    def __init__(self, names: Sequence[str], folder: Path | None, limit: int | None) -> None:
        """`folder`: of further tasks, in the harness's YAML; `limit`: documents of each. Raises ConfigError for a name
        that is no task."""
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._manager = TaskManager(include_path=None if folder is None else str(folder))
        self._limit = limit
        self._names = list(names)
        for name in names:
            if not self._manager.match_tasks([name]):
                raise ConfigError(f"tasks: lm_eval {lm_eval.__version__} has no task {name}")

    def check(self, subject: Subject) -> Row:
        """The figures, which are neither good nor bad here."""
        notes = Notes("tasks")
        evaluation = lm_eval.simple_evaluate(
            _Model(subject), tasks=self._names, task_manager=self._manager, limit=self._limit, log_samples=False
        )
        results: dict[str, dict[str, Any]] = evaluation["results"]
        for task, figures in results.items():
            notes.add("pass", f"{task}: " + ", ".join(_words(figures)))
        plain = msgspec.json.decode(msgspec.json.encode(results, enc_hook=_plain))
        return notes.row(lm_eval=lm_eval.__version__, limit=self._limit, results=plain)


def _plain(value: Any) -> Any:
    """Numbers of numpy's as Python's, anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _words(figures: dict[str, Any]) -> Iterator[str]:
    """`acc,none` and `acc_stderr,none` as one."""
    for name, value in figures.items():
        metric, comma, kind = name.partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            error = figures.get(f"{metric}_stderr,{kind}")
            yield f"{metric} {value:.3f}" + (f" +- {error:.3f}" if isinstance(error, float) else "")


class _Model(TemplateLM):
    """What the harness asks a model for."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self._tokenizer = subject.model.tokenizer

    @property
    def eot_token_id(self) -> int:
        ends = self._subject.info.eos_token_ids
        return ends[0] if ends else 0

    @property
    def prefix_token_id(self) -> int:
        begin = self._tokenizer.bos_token
        token_id = None if begin is None else self._tokenizer.id_of(begin)
        return self.eot_token_id if token_id is None else token_id

    @property
    def tokenizer_name(self) -> str:
        return self._subject.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of continuations behind their contexts: logprob, and whether it is the greedy one."""
        most = self._subject.info.context_length - 1
        whole = [([*context, *continuation])[-most:] for _, context, continuation in requests]
        scores = []
        for group in _groups(list(zip(whole, requests, strict=True))):
            prompts = [tokens for tokens, _ in group]
            answers = self._subject.generate(prompts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
            for answer, (_, (_, _, continuation)) in zip(answers, group, strict=True):
                entries = (answer.prompt_logprobs or [])[-len(continuation) :]
                known = [entry for entry in entries if entry is not None]
                scores.append((sum(entry.logprob for entry in known), all(entry.rank == 1 for entry in known)))
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        most = self._subject.info.context_length - 2
        scores = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, most, context_len=1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            scores.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return scores

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, wish: dict[str, Any]) -> str:
        until = wish.get("until") or []
        limit = wish.get("max_gen_toks", _ANSWER_TOKENS)
        room = max(1, self._subject.info.context_length - limit)
        parameters: dict[str, Any] = {"temperature": 0.0}
        if wish.get("do_sample"):
            parameters = {name: wish[name] for name in ("temperature", "top_p", "top_k") if name in wish}
        [answer] = self._subject.generate(
            [self.tok_encode(context)[-room:]],
            max_tokens=limit,
            stop=[until] if isinstance(until, str) else [text for text in until if text],
            **parameters,
        )
        return answer.text


def _groups(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[begin : begin + _TOGETHER] for begin in range(0, len(items), _TOGETHER))
