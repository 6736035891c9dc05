"""What is kept of processes that died: how much, for whom, and without what."""

from __future__ import annotations

import errno
import json
import logging
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.crash_folder import MOST_KEPT, Crash, crashes, keep_evidence, signal_name
from penstock.engines.host.redaction import LEFT_OUT, Redaction, is_secret

SECRETS = {
    "api_key": "the-first-secret",
    "options": {"hf_token": "the-second-secret", "nested": [{"adminPassword": "the-third-secret"}]},
    "url": "redis://user:the-fourth-secret@cache:6379/0",
    "cache_config": ["redis,password=the-fifth-secret", "local,size=7"],
    "engine_args": '{"credentials": {"any": "the-sixth-secret"}, "seed": 7}',
    "note": "as in hf_theSeventhSecret01 and Authorization: Bearer the-eighth-secret",
    "again": "it was the-first-secret",
    "http_restricted_api": ["model-repository:x-header=the-ninth-secret"],
    "args": {"model_config": '{"parameters": {"aws_secret_access_key": {"string_value": "the-tenth-secret"}}}'},
    "passphrase": ["the-eleventh-secret"],
}
PLAIN = {
    "max_num_batched_tokens": 2048,
    "first_token_id": 100,
    "num_key_value_heads": 8,
    "tokenizer": "/models/a/tokenizer.json",
    "monkey": "banana",
    "salt": None,
    "model_dir": "/models/a-key-to-success",
}


def crash(name: str = "m", pid: int = 7, **settings: Any) -> Crash:
    return Crash("engine", name, pid, -signal.SIGKILL, "its process ended", settings)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Path]:
    def _keep(given: Crash | None = None, folder: Path = tmp_path / "a/crashes") -> Path:
        thread = keep_evidence(folder, given or crash(), BlackBox())
        assert thread is not None
        thread.join(60)
        return folder

    return _keep


def test_what_is_kept(keep: Callable[..., Path]) -> None:
    folder = keep(crash("org/a model", options={"weights": "int8"}))
    [place] = crashes(folder)
    assert place.name.endswith("-engine-org-a-model-7")
    report = json.loads((place / "report.json").read_text())
    assert report["schema"] == "penstock-crash/1"
    assert (report["name"], report["status"], report["signal"]) == ("org/a model", -9, "SIGKILL")
    assert report["settings"] == {"options": {"weights": "int8"}}
    assert report["versions"]["openvino"]
    assert report["versions"]["python"]
    assert report["machine"]["system"].startswith("Linux ")
    assert report["machine"]["cpu"] is not None
    assert report["memory_events"]["risen"] == {}
    assert (place / "steps.csv").read_text().startswith("number,scheduled_at,seconds,num_requests")
    assert (place / "stacks.txt").read_text() == ""


def test_only_the_user_of_the_server_can_read_it(keep: Callable[..., Path]) -> None:
    folder = keep()
    [place] = crashes(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, place)] == [0o700] * 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in place.iterdir()} == {0o600}


def test_the_newest_are_kept_and_nothing_else_is_touched(keep: Callable[..., Path]) -> None:
    folder = keep()
    (folder / "notes").mkdir()
    (folder / "20200101-000000-engine-mine-1.txt").write_text("of somebody")
    kept = folder / "20200101-000001-front-old-1"
    kept.mkdir()
    (kept / "report.json").write_text("{}")
    (kept / "own.txt").write_text("of somebody")
    for pid in range(MOST_KEPT + 3):
        keep(crash(pid=pid))
    assert len([place for place in crashes(folder) if (place / "report.json").exists()]) == MOST_KEPT
    assert (folder / "notes").is_dir()
    assert (folder / "20200101-000000-engine-mine-1.txt").exists()
    assert [each.name for each in kept.iterdir()] == ["own.txt"]


def test_no_secrets_are_kept(keep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "the-twelfth-secret")
    monkeypatch.setenv("PENSTOCK_API_KEY", "the-thirteenth-secret")
    monkeypatch.setenv("OMP_PLACES", "cores the-twelfth-secret")
    [place] = crashes(keep(crash(**SECRETS, plain=PLAIN)))
    text = "".join(each.read_text() for each in place.iterdir()).lower()
    assert "-secret" not in text
    assert "seventhsecret" not in text
    report = json.loads((place / "report.json").read_text())
    assert report["settings"]["plain"] == PLAIN
    assert report["settings"]["engine_args"] == {"credentials": LEFT_OUT, "seed": 7}
    assert report["settings"]["url"] == f"redis://{LEFT_OUT}@cache:6379/0"
    assert report["settings"]["cache_config"] == [f"redis,password={LEFT_OUT}", "local,size=7"]
    assert report["variables"]["OMP_PLACES"] == f"cores {LEFT_OUT}"


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "apiKey", "x-api-key", "salt_key", "DbPassword"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "tokenizer", "monkey", "keyboard", "author", "compass"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_what_is_left_out_stays_so() -> None:
    redaction = Redaction({})
    once = redaction.tree(SECRETS)
    assert redaction.tree(once) == once


def is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_a_line_in_the_log_and_nothing_else(
    keep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "rename", is_full)
    folder = keep()
    assert list(folder.iterdir()) == []
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "no crash report of engine m could be written: [Errno 28] No space left" in record.getMessage()
    monkeypatch.undo()
    assert len(crashes(keep())) == 1


def test_a_folder_that_cannot_be_is_a_line_in_the_log(
    keep: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keep(folder=tmp_path / "file")
    keep(folder=Path("/proc/crashes"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_without_a_folder_nothing_is_kept() -> None:
    assert keep_evidence(None, crash(), BlackBox()) is None


def test_a_disk_that_hangs_holds_up_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("penstock.engines.host.crash_folder._write", lambda *_: goes_on.wait(60))
    begun = [keep_evidence(tmp_path, crash(), BlackBox()) for _ in range(9)]
    threads = [thread for thread in begun if thread is not None]
    assert 0 < len(threads) < 9
    goes_on.set()
    for thread in threads:
        thread.join(60)
    last = keep_evidence(tmp_path, crash(), BlackBox())
    assert last is not None
    last.join(60)


@pytest.mark.parametrize(
    ("status", "name"), [(-11, "SIGSEGV"), (-9, "SIGKILL"), (0, ""), (3, ""), (None, ""), (-99, "signal 99")]
)
def test_only_an_end_by_a_signal_has_a_name(status: int | None, name: str) -> None:
    assert signal_name(status) == name
