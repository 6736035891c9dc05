"""Where models come from, and what is read beside their weights."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from huggingface_hub import constants, hf_api

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.llm import models


def test_a_local_folder_is_called_by_its_name(tmp_path):
    (tmp_path / "my-model").mkdir()
    source = models.find_model(str(tmp_path / "my-model"))
    assert source == models.ModelSource(tmp_path / "my-model", "my-model")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nope", "a/b/c"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ConfigError, match="is not a folder"):
        models.find_model(name)


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        models.find_model(str(file))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.7, "top_k": 20, "eos_token_id": 2}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": False, "temperature": 1.0}, {"temperature": 0.0}),
        ({"temperature": None}, {}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert models.default_params(tmp_path) == expected


def test_a_model_without_generation_config_has_no_defaults(tmp_path):
    assert models.default_params(tmp_path) == {}


class _Hub(BaseHTTPRequestHandler):
    """The answers of a model hub that a snapshot of one small repository takes."""

    FILES: ClassVar = {
        "config.json": b'{"model_type": "llama"}',
        "weights.bin": b"",
        "consolidated.safetensors": b"",
        "original/model.safetensors": b"",
    }
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(("/api/models/org/small", "/org/small/")):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return
        if "/tree/" in path:
            files = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in self.FILES.items()]
            data = json.dumps(files).encode()
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.FILES]
            data = json.dumps({"id": "org/small", "sha": self.COMMIT, "siblings": siblings}).encode()
        else:
            data = self.FILES[path.rpartition("/")[2]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"etag"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_downloaded_without_what_is_not_needed(hub):
    source = models.find_model("org/small")
    assert source.name == "org/small"
    assert sorted(path.name for path in source.folder.iterdir()) == ["config.json"]


def test_an_unknown_hub_model_is_a_clear_error(hub):
    with pytest.raises(ConfigError, match="no hub model called 'org/absent'"):
        models.find_model("org/absent")
