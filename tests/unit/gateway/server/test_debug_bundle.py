"""`penstock debug bundle`: what is in it, and what is not."""

from __future__ import annotations

import json
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.crash_folder import Crash, keep_evidence
from penstock.gateway import cli

CONFIG = """
api_key = ["the-first-secret"]
admin_key = ["the-second-secret"]
cache_config = ["redis,host=cache", "redis,password=the-third-secret"]
http_restricted_api = ["model-repository:x-header=the-fourth-secret"]
otlp_endpoint = "http://user:the-fifth-secret@collector:4318"
max_num_seqs = 17
"""
ENVIRON = {
    "HF_TOKEN": "the-sixth-secret",
    "AWS_SECRET_ACCESS_KEY": "the-seventh-secret",
    "AWS_ACCESS_KEY_ID": "the-eighth-secret",
    "PENSTOCK_ENGINE_KEY": "the-ninth-secret",
    "OMP_NUM_THREADS": "3",
}
KEY = "the-tenth-secret"
VIEWS = {
    "/debug/settings": {"server": {"host": "0.0.0.0", "api_key": ["the-eleventh-secret"]}},
    "/debug/scheduler": {"m": {"num_running": 4}},
    "/debug/requests": {"requests": [{"id": "r", "tenant": "t"}], "said": f"Bearer {KEY}"},
}

Bundle = Callable[..., dict[str, str]]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Runs the command; gives the texts by the files' names."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "server.toml").write_text(CONFIG)

    def _bundle(*flags: str, config: bool = True) -> dict[str, str]:
        output = tmp_path / "report.tar.gz"
        given = ["--config", str(tmp_path / "server.toml")] if config else []
        assert cli.main(["debug", "bundle", "-o", str(output), *given, *flags]) == 0
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
        with tarfile.open(output) as archive:
            files = {member.name.removeprefix("report/"): archive.extractfile(member) for member in archive}
            return {name: file.read().decode() for name, file in files.items() if file is not None}

    return _bundle


def crash(folder: Path, **settings: Any) -> None:
    thread = keep_evidence(folder, Crash("engine", "m", 7, -9, "its process ended", settings), BlackBox())
    assert thread is not None
    thread.join(60)


@contextmanager
def serving(answers: dict[str, bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {KEY}"
            data = answers.get(self.path, b"not here") if allowed else b"no key"
            self.send_response(200 if allowed and self.path in answers else 403)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Not on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_in_it(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crash(tmp_path / "cache/penstock/crashes", options={"weights": "int8"})
    answers = {path: json.dumps(view).encode() for path, view in VIEWS.items()}
    with serving(answers) as url:
        files = bundle("--url", url, "--api-key", KEY)
    assert json.loads(files["settings.json"])["scheduling"]["max_num_seqs"] == 17
    assert json.loads(files["machine.json"])["versions"]["python"]
    assert json.loads(files["machine.json"])["variables"]["OMP_NUM_THREADS"] == "3"
    assert json.loads(files["server/scheduler.json"]) == VIEWS["/debug/scheduler"]
    assert json.loads(files["server/settings.json"])["server"]["host"] == "0.0.0.0"
    assert "/metrics: status 403: not here" in files["server/metrics.txt.failed.txt"]
    [report] = [text for name, text in files.items() if name.endswith("/report.json")]
    assert json.loads(report)["settings"] == {"options": {"weights": "int8"}}
    printed = capsys.readouterr().out
    assert all(f"  {name}\n" in printed for name in files)


def test_no_secret_is_in_it(bundle: Bundle, tmp_path: Path) -> None:
    """Wherever it comes from: a file, the environment, a flag, a server, evidence that an older version has written."""
    folder = tmp_path / "cache/penstock/crashes"
    crash(folder, api_key="the-twelfth-secret")
    [place] = folder.iterdir()
    (place / "stacks.txt").write_text("in a path: /home/the-sixth-secret/x.py, token=the-thirteenth-secret")
    (place / "own.txt").write_text("the-fourteenth-secret")
    answers = {path: json.dumps(view).encode() for path, view in VIEWS.items()}
    with serving(answers | {"/metrics": b'a{key="the-fifteenth-secret",model="m"} 1\n'}) as url:
        files = bundle("--url", url, "--api-key", KEY)
    assert 'model="m"} 1' in files["server/metrics.txt"]
    found = [(name, line) for name, text in files.items() for line in text.splitlines() if "-secret" in line]
    assert found == []


def test_what_cannot_be_had_is_told_in_its_place(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text("no toml")
    files = bundle("--url", "http://127.0.0.1:1")
    assert "cannot read" in json.loads(files["settings.json"])["trouble"]
    assert "No such file" in files["crashes/none.txt"]
    assert "/metrics: [Errno" in files["server/metrics.txt.failed.txt"]


def test_an_answer_without_end_is_cut(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.commands.top.operator_port.MOST_BYTES", 1000)
    with serving({"/metrics": b"x" * 100_000}) as url:
        files = bundle("--url", url, "--api-key", KEY, config=False)
    assert len(files["server/metrics.txt"]) < 100_000


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::1", "host:port"])
def test_an_address_that_is_none(bundle: Bundle, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bundle("--url", url)
    assert "is no URL of a server" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_overwritten(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle()
    with pytest.raises(SystemExit):
        bundle()
    assert "report.tar.gz cannot be written: File exists" in capsys.readouterr().err
    (tmp_path / "report.tar.gz").unlink()
    bundle("--crash-dir", "")
