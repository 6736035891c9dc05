"""A repository of NVIDIA's LLM API layout with the engine that is made for it, over a stand-in of TensorRT-LLM.

The stand-in computes nothing: what is shown is the way from model.yaml and tensors to the LLM's arguments and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import support.tensorrt_llm
from support.language_repository import write_trtllm
from support.models import load_reference, make_adapter, make_model
from support.server import Server, serving

PROMPT = "The cat"
_PACKAGE = """
import sys
from types import ModuleType

import support.tensorrt_llm as stand_in

for name, contents in stand_in.CONTENTS.items():
    module = sys.modules.setdefault(name, ModuleType(name))
    for each in contents:
        setattr(module, each.__name__, each)
"""


def install_stand_in(site: Path) -> dict[str, str]:
    """The environment of a server that finds the stand-in where the package would be."""
    (site / "tensorrt_llm").mkdir()
    (site / "tensorrt_llm" / "__init__.py").write_text(_PACKAGE)
    (site / "tensorrt_llm-1.2.0.dist-info").mkdir()
    (site / "tensorrt_llm-1.2.0.dist-info" / "METADATA").write_text("Name: tensorrt-llm\nVersion: 1.2.0\n")
    return {"PYTHONPATH": f"{site}:{Path(support.tensorrt_llm.__file__).parents[1]}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    weights = make_model(tmp_path_factory.mktemp("weights"))
    cache = {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.4, "max_tokens": 32 * 40}
    arguments: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 256, "max_seq_len": 200}
    arguments["kv_cache_config"] = cache
    version = write_trtllm(
        repository, "tensorrt_llm", str(weights), {**arguments, "lora_config": {"lora_dir": ["sql"]}}
    )
    make_adapter(version / "sql", load_reference(weights))
    environ = install_stand_in(tmp_path_factory.mktemp("site"))
    with serving("--model-repository", str(repository), environ=environ) as server:
        yield server


def generate(server: Server, **inputs: Any) -> dict[str, Any]:
    body = {"text_input": PROMPT, "sampling_param_exclude_input_from_output": True, **inputs}
    answer = server.post("/v2/models/tensorrt_llm/generate", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_llm_gets_what_model_yaml_says(server: Server) -> None:
    told = server.wait_for_log("starting TensorRT-LLM with").string
    for part in ("'max_batch_size': 8", "'max_num_tokens': 256", "'max_seq_len': 200", "'backend': 'pytorch'"):
        assert part in told
    assert re.search(r"free_gpu_memory_fraction'?[:=] ?0\.4\b", told)
    assert re.search(r"enable_block_reuse'?[:=] ?False\b", told)
    assert re.search(r"max_tokens'?[:=] ?1280\b", told)


def test_tensors_come_back(server: Server) -> None:
    found = generate(server, return_finish_reason=True, return_stop_reason=True, sampling_param_max_tokens=9)
    assert (found["finish_reason"], found["stop_reason"]) == ("length", "None")
    completion = server.client().completions.create(model="tensorrt_llm", prompt=PROMPT, max_tokens=9, temperature=0)
    assert found["text_output"] == completion.choices[0].text


def test_adapters_of_lora_dir_are_chosen_by_name(server: Server) -> None:
    assert generate(server, lora_name="sql")["text_output"] != generate(server)["text_output"]
    assert {model.id for model in server.client().models.list().data} == {"tensorrt_llm", "sql"}


def test_arguments_that_the_llm_does_not_know_are_named(server: Server, tmp_path: Path) -> None:
    write_trtllm(tmp_path / "models", "m", "penstock-demo", {"max_batch_sizes": 4})
    (tmp_path / "site").mkdir()
    other = Server("--model-repository", str(tmp_path / "models"), environ=install_stand_in(tmp_path / "site"))
    assert other.process.wait(60) == 1
    other.wait_for_log("TensorRT-LLM has no argument max_batch_sizes; did you mean max_batch_size")
    assert httpx.get(server.url + "/v2/health/ready").status_code == 200
