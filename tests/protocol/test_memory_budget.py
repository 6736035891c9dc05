"""A server that refuses what does not fit, before it loads it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.gateway.cli import main
from support.server import Server, serving

CONTROL = ("--model-control-mode", "explicit")
BLOCKS = 512
"""Of the demo model: 48 MiB, twice that on a CPU without bf16; with weights and process above 200."""
REFUSED = r"does not fit into memory: it needs 2\d\d MiB: .* (48|96) MiB KV cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("red", "blue"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text('backend: "penstock"\n')
        settings = {"model": "penstock-demo", "engine": "openvino", "num_kv_blocks": BLOCKS}
        (tmp_path / name / "1" / "model.json").write_text(json.dumps(settings))
    return tmp_path


def change(server: Server, name: str, verb: str) -> httpx.Response:
    return server.post(f"/v2/repository/models/{name}/{verb}", {})


def answers(server: Server, name: str) -> bool:
    choice = server.client().completions.create(model=name, prompt="import os", max_tokens=4).choices[0]
    return bool(choice.text)


def test_a_model_that_does_not_fit_ends_the_start() -> None:
    server = Server("--engine", "openvino", "--num-kv-blocks", str(BLOCKS), "--memory-limit", "100MiB")
    assert server.process.wait(60) == 1
    server.wait_for_log(
        "ERROR .* the models could not be loaded: model 'penstock-demo' "
        + REFUSED
        + r".*; 100 MiB of --memory-limit 100 MiB are left; "
        + r"make it smaller \(--kv-cache-memory, --num-kv-blocks, --weights"
    )


@pytest.mark.parametrize("flag", ["--memory-limit", "--kv-cache-memory"])
def test_a_limit_that_is_none_ends_the_start(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--engine", "simulated", flag, "much"])
    assert capsys.readouterr().err.startswith(f"penstock serve: error: {flag}: 'much' is not an amount of memory")


def test_the_second_model_has_to_wait_until_the_first_has_gone(repository: Path) -> None:
    with serving(
        "--model-repository", str(repository), *CONTROL, "--load-model=red", "--memory-limit", "350MiB"
    ) as server:
        refused = change(server, "blue", "load")
        assert refused.status_code == 400
        text = refused.json()["error"]
        assert "Resource exhausted: model 'blue' does not fit into memory" in text
        assert text.rstrip("; ").endswith("MiB)")
        assert "or unload another (red 2" in text
        assert answers(server, "red")
        # a new version is made beside the old one, which keeps serving
        settings = repository / "red" / "1" / "model.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_num_seqs": 8}))
        assert "does not fit" in change(server, "red", "load").text
        assert answers(server, "red")
        assert change(server, "red", "unload").status_code == 200
        loaded = change(server, "blue", "load")
        assert loaded.status_code == 200, loaded.text
        assert answers(server, "blue")


def test_of_two_that_are_loaded_at_once_one_fits(repository: Path) -> None:
    with serving("--model-repository", str(repository), *CONTROL, "--memory-limit", "350MiB") as server:
        with ThreadPoolExecutor() as threads:
            statuses = [r.status_code for r in threads.map(lambda name: change(server, name, "load"), ("red", "blue"))]
        assert sorted(statuses) == [200, 400]
