"""`penstock run-batch`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from support.fork import completed

COMMAND = ("run-batch", "--engine", "simulated", "--served-model-name", "m")


def lines(*names: str) -> str:
    body = {"model": "m", "prompt": "Hi", "max_tokens": 3}
    made = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in names]
    return "".join(json.dumps(each) + "\n" for each in made)


def run(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return completed(*COMMAND, "-i", str(source), "-o", str(target))


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(lines("a", "b"))
    done = run(source, target)
    assert done.returncode == 0, done.stderr
    written = target.read_text()
    source.write_text(lines("a", "b", "c", "d"))
    target.write_text(written + '{"id": "batch_req_1", "custom_id": "c", "resp')
    done = run(source, target)
    assert "2 answered, 0 failed, 2 before" in done.stderr
    assert target.read_text().startswith(written)
    results = [json.loads(text) for text in target.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in results) == ["a", "b", "c", "d"]
    assert {each["response"]["status_code"] for each in results} == {200}


def test_a_line_that_is_wrong_costs_that_line_and_files_that_cannot_be_read_the_run(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(lines("a", "a"))
    done = run(source, target)
    assert (done.returncode, "1 answered, 1 failed" in done.stderr) == (0, True), done.stderr
    [wrong] = [each["error"] for each in map(json.loads, target.read_text().splitlines()) if each["error"]]
    assert (wrong["code"], wrong["line"]) == ("duplicate_custom_id", 2)
    missing = run(tmp_path / "no file", target)
    assert missing.returncode == 1
    assert "no file cannot be read: No such file or directory" in missing.stderr
    source.write_text(lines("a"))
    target.write_text("a poem\n")
    assert run(source, target).returncode == 1
    assert target.read_text() == "a poem\n"
