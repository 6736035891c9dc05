"""A repository of Triton's vLLM backend, as its samples are, run by vLLM itself. Only where vLLM is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.language_repository import write_vllm
from support.models import load_reference, make_adapter, make_model
from support.server import Server, serving

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
PROMPT = "The cat"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of the same weights, one with two adapters."""
    repository = tmp_path_factory.mktemp("repository")
    weights = make_model(tmp_path_factory.mktemp("weights"), head_dim=32)  # the least of its kernels for CPUs
    memory = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 128}
    write_vllm(repository, "plain", str(weights), memory)
    version = write_vllm(repository, "tuned", str(weights), {**memory, "enable_lora": "true", "max_lora_rank": 8})
    model = load_reference(weights)
    for seed, name in enumerate(("sql", "near"), 1):
        make_adapter(version / name, model, seed=seed)
    (version / "multi_lora.json").write_text(json.dumps({"sql": str(version / "sql"), "near": "near"}))
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving("--model-repository", str(repository)) as server:
        yield server


def generated(server: Server, model: str, **parameters: object) -> str:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "temperature": 0, "max_tokens": 8, **parameters}
    answer = server.post(f"/v2/models/{model}/generate", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text_output"])


def test_the_sample_is_served(server: Server) -> None:
    found = server.client().completions.create(model="plain", prompt=PROMPT, max_tokens=8, temperature=0)
    assert generated(server, "plain") == found.choices[0].text


def test_adapters_of_multi_lora_json_are_chosen_by_lora_name(server: Server) -> None:
    plain = generated(server, "tuned")
    assert plain == generated(server, "plain")
    answers = {name: generated(server, "tuned", lora_name=name) for name in ("sql", "near")}
    assert len({plain, *answers.values()}) == 3
    found = server.client().completions.create(model="sql", prompt=PROMPT, max_tokens=8, temperature=0)
    assert answers["sql"] == found.choices[0].text
    body = {"text_input": PROMPT, "lora_name": "other"}
    assert "LoRA other is not supported" in server.post("/v2/models/tuned/generate", body).json()["error"]


def test_settings_that_vllm_does_not_know_keep_the_model_from_loading(tmp_path: Path) -> None:
    write_vllm(tmp_path, "m", "penstock-demo", {"swap_room": 4})
    server = Server("--model-repository", str(tmp_path))
    assert server.process.wait(120) == 1
    server.wait_for_log("vLLM has no setting 'swap_room'")
