"""Repositories of Triton's vLLM and TensorRT-LLM backends: several models on one server, clients' own libraries."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from support.language_repository import write_trtllm, write_vllm
from support.processes import child_pids
from support.server import Server, refusal, serving

FLAGS = (
    "--backend-config=vllm,engine=openvino",
    "--backend-config=tensorrtllm,engine=openvino",
    "--model-control-mode=explicit",
    "--load-model=*",
    "--num-kv-blocks=64",
)
"""No GPU is here, so the operator has other engines run these models."""
PROMPT = "The cat"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    write_vllm(repository, "vllm_model", "penstock-demo")
    write_vllm(repository, "second", "penstock-demo", {"max_model_len": 96})
    write_trtllm(repository, "tensorrt_llm", "penstock-demo")
    with serving("--model-repository", str(repository), *FLAGS) as server:
        yield server


def text_input(name: str, value: str) -> triton_grpc.InferInput:
    found = triton_grpc.InferInput(name, [1], "BYTES")
    found.set_data_from_numpy(np.array([value.encode()], np.object_))
    return found


def bool_input(name: str, value: bool) -> triton_grpc.InferInput:
    found = triton_grpc.InferInput(name, [1], "BOOL")
    found.set_data_from_numpy(np.array([value]))
    return found


def streamed(server: Server, model: str, inputs: list[triton_grpc.InferInput]) -> list[str]:
    """The texts of a ModelStreamInfer, as vllm_backend's samples/client.py asks for them."""
    results: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer(model, inputs, request_id="1", enable_empty_final_response=True)
        texts = []
        while True:
            result = results.get(timeout=60)
            if isinstance(result, InferenceServerException):
                raise result
            found = result.as_numpy("text_output")
            if found is not None:
                texts.append(found[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return texts


def completed(server: Server, model: str, max_tokens: int) -> str:
    """The same over the OpenAI API."""
    found = server.client().completions.create(model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0)
    return found.choices[0].text


def test_each_model_has_a_process_of_its_own(server: Server) -> None:
    assert len(child_pids(server.process.pid)) == 3
    assert {model.id for model in server.client().models.list().data} == {"vllm_model", "second", "tensorrt_llm"}


def test_vllm_s_own_client_streams(server: Server) -> None:
    sampling = json.dumps({"temperature": "0", "top_p": "1", "max_tokens": 300})
    inputs = [text_input("text_input", PROMPT), bool_input("stream", True), text_input("sampling_parameters", sampling)]
    texts = streamed(server, "vllm_model", inputs)
    assert len(texts) > 1
    assert "".join(texts) == completed(server, "vllm_model", 300)


def test_the_tensorrt_llm_form_streams_the_text_so_far(server: Server) -> None:
    max_tokens = triton_grpc.InferInput("sampling_param_max_tokens", [1], "INT32")
    max_tokens.set_data_from_numpy(np.array([300], np.int32))
    texts = streamed(
        server, "tensorrt_llm", [text_input("text_input", PROMPT), bool_input("streaming", True), max_tokens]
    )
    assert len(texts) > 1
    assert texts[-1] == completed(server, "tensorrt_llm", 300)


def test_generate_as_the_vllm_backend_s_readme_has_it(server: Server) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 8}}
    answer = server.post("/v2/models/vllm_model/generate", body)
    assert answer.json()["text_output"] == PROMPT + completed(server, "vllm_model", 8)


def test_generate_as_the_tensorrt_llm_backend_s_documentation_has_it(server: Server) -> None:
    answer = server.post("/v2/models/tensorrt_llm/generate", {"text_input": PROMPT, "max_tokens": 10}).json()
    assert answer["text_output"] == PROMPT + completed(server, "tensorrt_llm", 10)


def test_the_tensorrt_llm_form_tells_how_an_answer_ended_and_how_likely_it_was(server: Server) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 30, "sampling_param_exclude_input_from_output": True}
    whole = server.post("/v2/models/tensorrt_llm/generate", body).json()["text_output"]
    asked = {"return_finish_reason": True, "return_stop_reason": True, "return_cumulative_logprob": True}
    stop = whole[20:24]
    found = server.post("/v2/models/tensorrt_llm/generate", body | asked | {"sampling_param_stop": [stop]}).json()
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert found["text_output"] == whole[: whole.index(stop)]
    found = server.post("/v2/models/tensorrt_llm/generate", body | asked | {"sampling_param_max_tokens": 4}).json()
    choice = (
        server.client()
        .completions.create(model="tensorrt_llm", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=0)
        .choices[0]
    )
    assert choice.logprobs is not None
    assert found["cumulative_logprob"] == pytest.approx(sum(choice.logprobs.token_logprobs or []), rel=1e-4)


def test_generate_stream_of_both_forms(server: Server) -> None:
    def texts(model: str, body: dict[str, Any]) -> list[str]:
        with httpx.stream("POST", f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=60) as answer:
            return [json.loads(line[6:])["text_output"] for line in answer.iter_lines() if line.startswith("data: ")]

    found = texts("vllm_model", {"text_input": PROMPT, "stream": True, "temperature": 0, "max_tokens": 12})
    assert "".join(found) == completed(server, "vllm_model", 12)
    found = texts("tensorrt_llm", {"text_input": PROMPT, "streaming": True, "sampling_param_max_tokens": 12})
    assert found[-1] == completed(server, "tensorrt_llm", 12)


def test_infer_where_nothing_streams(server: Server) -> None:
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        inputs = [text_input("text_input", PROMPT), bool_input("sampling_param_exclude_input_from_output", True)]
        found = client.infer("tensorrt_llm", inputs).as_numpy("text_output")
        assert found[0].decode() == completed(server, "tensorrt_llm", 32)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        plain = triton_http.InferInput("text_input", [1], "BYTES")
        plain.set_data_from_numpy(np.array([PROMPT.encode()], np.object_))
        found = client.infer("vllm_model", [plain], parameters={"max_tokens": 6, "temperature": 0})
        assert found.as_numpy("text_output")[0].decode() == PROMPT + completed(server, "vllm_model", 6)


def test_the_configuration_has_every_tensor_and_is_decoupled(server: Server) -> None:
    config = httpx.get(f"{server.url}/v2/models/vllm_model/config").json()
    assert (config["backend"], config["max_batch_size"]) == ("vllm", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {"exclude_input_in_output", "return_logprobs"} <= {tensor["name"] for tensor in config["input"]}
    assert config["instance_group"][0]["kind"] == "KIND_MODEL"
    described = httpx.get(f"{server.url}/v2/models/tensorrt_llm").json()
    assert described["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1]}


def test_load_and_unload_with_another_configuration(server: Server) -> None:
    with triton_http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60) as client:
        client.unload_model("second")
        assert "second" not in {model.id for model in server.client().models.list().data}
        refused = json.dumps({"backend": "vllm", "instance_group": [{"kind": "KIND_MODEL", "count": 2}]})
        with pytest.raises(InferenceServerException, match="instance_group: 2 instances"):
            client.load_model("second", config=refused)
        parameters = {"REPORT_CUSTOM_METRICS": {"string_value": "true"}}
        client.load_model("second", config=json.dumps({"backend": "vllm", "parameters": parameters}))
        assert client.get_model_config("second")["parameters"] == parameters
    assert server.post("/v2/models/second/generate", {"text_input": PROMPT}).status_code == 200
    too_long = server.post("/v2/models/second/generate", {"text_input": PROMPT * 99})
    assert (too_long.status_code, "maximum context length is 96" in too_long.json()["error"]) == (400, True)


def test_what_is_not_served_is_said(server: Server) -> None:
    answer = server.post("/v2/models/tensorrt_llm/generate", {"text_input": PROMPT, "lora_path": "/etc"})
    assert (answer.status_code, "'lora_path' is not supported" in answer.json()["error"]) == (501, True)
    answer = server.post("/v2/models/vllm_model/generate", {"text_input": PROMPT, "lora_name": "x"})
    assert (answer.status_code, answer.json()["error"]) == (501, "LoRA feature is not enabled.")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("vllm,engine=llama", "vllm,engine='llama' is none of auto, openvino"),
        ("vllm,threads=2", "the backend vllm has no setting 'threads'"),
        ("penstock,engine=torch", "the backend penstock has no setting 'engine'"),
    ],
)
def test_the_operator_s_slips_end_the_start(
    tmp_path: Path, option: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert told in refusal(caplog, "--model-repository", str(tmp_path), "--backend-config", option)
