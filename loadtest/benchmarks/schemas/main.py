"""JSON schemas on servers: `python loadtest/benchmarks schemas SUITE --server NAME=URL ...`.

SUITE is a checkout of JSON-Schema-Test-Suite, which the source distribution of `jsonschema` has in its folder `json`.
Each of its schemas is sent to each server as vLLM's `structured_outputs`: once alone for one token, which says whether
it is refused and how long it takes to compile (less the same request again), then for some whole answers with a
temperature of 1. A model with random weights does best: it knows nothing of JSON, so all there is of it in an answer
comes from the server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from benchmarks.schemas.client import Answer, Client
from benchmarks.schemas.suite import Case, Suite

_FAILED = "failed"
_KINDS = ("right", "wrong", "cut off", _FAILED)
_OTHER = {"type": "object", "properties": {"another": {"const": 1}}}


class Outcome:
    """Of one server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compile_ms: list[float] = []
        self.compiled = 0
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        """Neither 200 nor 400."""
        self.answers: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []


def main(settings: Mapping[str, Any]) -> int:
    suite = Suite(Path(settings["suite"]), settings["draft"])
    cases = list(suite.cases())
    outcomes = []
    for server in settings["server"]:
        name, _, url = server.partition("=")
        client = Client(url, settings["model"], settings["timeout"])
        outcomes.append(_measure(name, client, suite, cases, settings))
    print(_table(outcomes, cases))
    if settings["json"]:
        Path(settings["json"]).write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return 0


def _measure(name: str, client: Client, suite: Suite, cases: Sequence[Case], settings: Mapping[str, Any]) -> Outcome:
    outcome = Outcome(name)
    client.ask(_OTHER, 1, 0)  # the first grammar of all reads the vocabulary
    taken = [case for case in cases if _is_taken(client, case, outcome)]
    ask = partial(_answer, client, settings["max_tokens"])
    work = [(case, seed) for case in taken for seed in range(settings["answers"])]
    with ThreadPoolExecutor(settings["concurrency"]) as threads:
        for (case, _), answer in zip(work, threads.map(ask, work), strict=True):
            kind, why = _judge(suite, case, answer)
            outcome.answers[kind] += 1
            if kind in ("wrong", _FAILED):
                row = {"kind": kind, "why": why, "text": answer.text[:500]}
                outcome.wrong.append(row | {"keyword": case.keyword, "title": case.title, "schema": case.schema})
    return outcome


def _is_taken(client: Client, case: Case, outcome: Outcome) -> bool:
    schema = case.schema | {"description": str(uuid4())} if isinstance(case.schema, dict) else case.schema
    first = client.ask(schema, 1, 0)  # one that no server has cached
    if first.status != 200:
        (outcome.refused if first.status == 400 else outcome.failed)[case.keyword] += 1
        return False
    outcome.compiled += 1
    again = min(client.ask(schema, 1, 0).seconds for _ in range(2))
    outcome.compile_ms.append(1000 * max(0.0, first.seconds - again))
    return True


def _answer(client: Client, max_tokens: int, work: tuple[Case, int]) -> Answer:
    case, seed = work
    return client.ask(case.schema, max_tokens, seed)


def _judge(suite: Suite, case: Case, answer: Answer) -> tuple[str, str]:
    if answer.status != 200:
        return _FAILED, f"{answer.status}"
    if not answer.complete:
        return "cut off", ""
    problem = suite.problem(case.schema, answer.text)
    return ("wrong", problem) if problem else ("right", "")


def _table(outcomes: Sequence[Outcome], cases: Sequence[Case]) -> str:
    columns = ("schemas", "compiled", "refused", "failed", "compiling, ms: p50", "p99", "finished answers", "right")
    rows = [f"| server | {' | '.join(columns)} | cut off | failed |", "| --- |" + " ---: |" * (len(columns) + 2)]
    for one in outcomes:
        p50, p99 = np.percentile(one.compile_ms or [0.0], (50, 99))
        right, wrong, cut_off, failed = (one.answers[kind] for kind in _KINDS)
        share = right / (right + wrong) if right else 0.0
        counts = f"{len(cases)} | {one.compiled} | {one.refused.total()} | {one.failed.total()}"
        rows.append(
            f"| {one.name} | {counts} | {p50:.1f} | {p99:.1f} | {right + wrong} | {share:.2%} | {cut_off} | {failed} |"
        )
    names = " | ".join(one.name for one in outcomes)
    rows += ["", f"| refused, of | schemas | {names} |", "| --- | ---: |" + " ---: |" * len(outcomes)]
    totals = Counter(case.keyword for case in cases)
    for keyword, total in totals.items():
        sums = [one.refused[keyword] + one.failed[keyword] for one in outcomes]
        if any(sums):
            rows.append(f"| {keyword} | {total} | {' | '.join(map(str, sums))} |")
    return "\n".join(rows)
