"""The example repository on a real server, with Triton's own clients."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families

from support.language_repository import write_trtllm
from support.server import Server, block, serving, wait_until
from support.tritonclient import infer_inputs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    latencies = ("--metrics-config=summary_latencies=true", "--metrics-config", "histogram_latencies=true")
    with serving(
        "--model-repository", str(EXAMPLES / "model_repository"), "--allow-client-shm=true", *latencies
    ) as server:
        server.wait_for_log(r"ready: 4 models: add_sub 1, add_sub_onnx 1, chat 1, repeat 1")
        yield server


def text(*values: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode() for value in values], np.object_)


@pytest.mark.parametrize(
    ("client", "told"),
    [
        ("http_infer.py", "sums"),
        ("grpc_infer.py", "sums"),
        ("grpc_stream.py", "is 42"),
        ("shared_memory.py", "sums"),
        ("llm_stream.py", "os.path.join"),
        ("openai_chat.py", "os.path.join"),
        ("openai_responses.py", "os.path.join"),
    ],
)
def test_the_examples_say_what_they_promise(server: Server, client: str, told: str) -> None:
    address = server.grpc if "grpc" in client or "llm" in client else server.url.removeprefix("http://")
    url = server.url if client.startswith("openai") else address
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "clients" / client), "--url", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_the_curl_example_streams(server: Server) -> None:
    script = EXAMPLES / "clients" / "generate_stream.sh"
    done = subprocess.run(
        ["sh", str(script), "--url", server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    repeated, answer = done.stdout.split("chat goes on with a text:")
    assert repeated.count("data: ") == 3
    assert answer.count("data: ") >= 1  # how many: on a busy machine all steps may leave together


def test_the_readme_s_words_work(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python", "tritonclient").replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    exec(code, {})  # noqa: S102  # the README is ours
    assert capsys.readouterr().out.strip() == str(np.full((1, 16), 2, np.float32))
    command = block("sh", "generate_stream").replace("http://127.0.0.1:8000", server.url)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line.startswith("data: {")]
    assert "the greatest common divisor" in "".join(event["text_output"] for event in events)


@pytest.mark.parametrize("model", ["add_sub", "add_sub_onnx"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_classic_models_answer(server: Server, model: str, protocol: str) -> None:
    module: Any = triton_http if protocol == "http" else triton_grpc
    client = module.InferenceServerClient(server.url.removeprefix("http://") if protocol == "http" else server.grpc)
    a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.ones((1, 16), np.float32)
    result = client.infer(model, infer_inputs(module, INPUT0=a, INPUT1=b))
    assert (result.as_numpy("OUTPUT0") == a + b).all()
    assert (result.as_numpy("OUTPUT1") == a - b).all()
    client.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_language_model_answers_a_plain_inference(server: Server, protocol: str) -> None:
    """Triton refuses this for decoupled models; a request without `stream` has exactly one response."""
    module: Any = triton_http if protocol == "http" else triton_grpc
    client = module.InferenceServerClient(server.url.removeprefix("http://") if protocol == "http" else server.grpc)
    sampling = text(json.dumps({"max_tokens": 5, "temperature": 0, "logprobs": 2}))
    inputs = infer_inputs(
        module,
        text_input=text("def f(x):"),
        sampling_parameters=sampling,
        return_logprobs=np.array([True]),
        return_cumulative_logprob=np.array([True]),
        return_num_output_tokens=np.array([True]),
        return_finish_reason=np.array([True]),
    )
    result = client.infer("chat", inputs)
    assert result.as_numpy("text_output")[0].startswith(b"def f(x):")
    assert (result.as_numpy("finish_reason")[0], result.as_numpy("num_output_tokens")[0]) == (b"length", 5)
    positions = json.loads(result.as_numpy("logprobs")[0])
    assert len(positions) == 5
    chosen = [max(position.values(), key=lambda entry: entry["logprob"]) for position in positions]
    assert all(entry["rank"] == 1 for entry in chosen)
    assert sum(entry["logprob"] for entry in chosen) == pytest.approx(
        result.as_numpy("cumulative_logprob")[0], abs=1e-4
    )
    client.close()


def test_a_streaming_inference_needs_a_stream(server: Server) -> None:
    body = {
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]},
            {"name": "stream", "shape": [1], "datatype": "BOOL", "data": [True]},
        ]
    }
    answer = server.post("/v2/models/chat/infer", body)
    assert answer.status_code == 501
    assert "stream" in answer.json()["error"]


def test_the_same_model_speaks_openai(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["chat"]
    generated = server.post(
        "/v2/models/chat/generate",
        {"text_input": "def f(x):", "exclude_input_in_output": True, "max_tokens": 12, "temperature": 0},
    ).json()["text_output"]
    completed = server.client().completions.create(model="chat", prompt="def f(x):", max_tokens=12, temperature=0)
    assert completed.choices[0].text == generated


def test_a_client_that_leaves_frees_the_language_model(server: Server) -> None:
    body = {"text_input": "def f(x):", "stream": True, "max_tokens": 1900, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v2/models/chat/generate_stream", json=body, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: ")
    wait_until(server.is_idle)


def test_metrics_have_triton_s_names(server: Server) -> None:
    server.post("/v2/models/chat/generate", {"text_input": "x", "max_tokens": 2})
    lines = httpx.get(server.operator + "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("nv_"))
    for model in ("add_sub", "add_sub_onnx", "chat", "repeat"):
        assert f'nv_inference_request_success{{model="{model}",version="1"}}' in values
        assert float(values[f'nv_model_load_duration_secs{{model="{model}",version="1"}}']) > 0
        assert values[f'nv_inference_pending_request_count{{model="{model}",version="1"}}'] == "0"
    assert int(values['nv_inference_count{model="chat",version="1"}']) > 0
    assert "# TYPE nv_inference_count counter" in lines


@pytest.mark.parametrize("model", ["add_sub", "chat", "repeat"])
def test_latencies_are_summed_up_and_counted(server: Server, model: str) -> None:
    """Of a classic model, a language model and a decoupled one."""
    before = latencies(server, model)
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        ones = np.ones((1, 16), np.float32)
        client.infer("add_sub", infer_inputs(triton_grpc, INPUT0=ones, INPUT1=ones))
    server.post("/v2/models/chat/generate", {"text_input": "x", "max_tokens": 2})
    server.post("/v2/models/repeat/generate_stream", {"IN": [1, 2]})
    after = latencies(server, model)
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        family = f"nv_inference_{name}_summary_us"
        assert after[f"{family}_count"] == before[f"{family}_count"] + 1
    for share in ("0.5", "0.9", "0.95", "0.99", "0.999"):
        largest = 1.004 * after["nv_inference_request_summary_us_sum"]
        assert 0 < after[f"nv_inference_request_summary_us {share}"] <= largest
    first = "nv_inference_first_response_histogram_ms_count"
    if model == "add_sub":
        assert first not in after
    else:
        assert after[first] == before[first] + 1


def latencies(server: Server, model: str) -> dict[str, float]:
    """The summaries and the histogram of a model, by name and quantile."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(server.operator + "/metrics").text):
        for sample in family.samples:
            if ("_summary_" in sample.name or "_histogram_" in sample.name) and sample.labels["model"] == model:
                found[f"{sample.name} {sample.labels.get('quantile', '')}".strip()] = sample.value
    return found


BUCKETS = """
model_metrics {
  metric_control [ {
    metric_identifier { family: "nv_inference_first_response_histogram_ms" }
    histogram_options { buckets: [ 0, 1000000 ] }
  } ]
}
"""


def test_metric_tags_are_labels_and_backends_may_be_programs(tmp_path: Path) -> None:
    """A python-based backend is a model.py that stands outside of the repository, as Triton's vLLM backend does."""
    programs, repository = tmp_path / "backends", tmp_path / "models"
    (programs / "adder").mkdir(parents=True)
    shutil.copy(EXAMPLES / "model_repository" / "add_sub" / "1" / "model.py", programs / "adder" / "model.py")
    (repository / "sums" / "1").mkdir(parents=True)
    config = (EXAMPLES / "model_repository" / "add_sub" / "config.pbtxt").read_text()
    tags = 'metric_tags { key: "team" value: "search" }'
    (repository / "sums" / "config.pbtxt").write_text(config.replace('"python"', '"adder"') + tags)
    shutil.copytree(EXAMPLES / "model_repository" / "repeat", repository / "repeat")
    with (repository / "repeat" / "config.pbtxt").open("a") as file:
        file.write(BUCKETS)
    flags = (f"--backend-directory={programs}", "--metrics-config=histogram_latencies=true")
    with serving("--model-repository", str(repository), *flags) as server:
        server.wait_for_log(r"ready: 2 models: repeat 1, sums 1")
        client = triton_http.InferenceServerClient(server.url.removeprefix("http://"))
        ones = np.ones((1, 16), np.float32)
        result = client.infer("sums", infer_inputs(triton_http, INPUT0=ones, INPUT1=ones))
        assert (result.as_numpy("OUTPUT0") == 2).all()
        client.close()
        server.post("/v2/models/repeat/generate_stream", {"IN": [1, 2]})
        lines = httpx.get(server.operator + "/metrics").text.splitlines()
        first = "nv_inference_first_response_histogram_ms_bucket"
        found = [line.partition(",le=")[2] for line in lines if line.startswith(first)]
        assert found == ['"0"} 0', '"1e+06"} 1', '"+Inf"} 1']
        assert "summary" not in "".join(lines)
        assert 'nv_inference_count{_team="search",model="sums",version="1"} 1' in lines


def test_wrong_paths_and_names_have_triton_s_shape(server: Server) -> None:
    missing = server.post("/v2/models/nothing/infer", {"inputs": []})
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    assert httpx.get(server.url + "/v2/nonsense").json() == {"error": "Not Found"}


def test_engines_that_are_not_here_are_named(tmp_path: Path) -> None:
    write_trtllm(tmp_path, "trtllm", "penstock-demo")
    (tmp_path / "magic" / "1").mkdir(parents=True)
    (tmp_path / "magic" / "config.pbtxt").write_text('backend: "magic"\n')
    server = Server("--model-repository", str(tmp_path))
    assert server.process.wait(60) == 1
    for told in (
        "magic.*backend",
        r"trtllm.*needs the package tensorrt_llm.*penstock-server\[tensorrt-llm\]",
    ):
        server.wait_for_log(f"ERROR .*{told}")


def test_a_language_model_is_reloaded_without_a_gap(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "model_repository" / "chat", tmp_path / "chat")
    flags = ("--model-repository", str(tmp_path), "--model-control-mode=explicit", "--load-model=chat")
    with serving(*flags) as server:
        server.wait_for_log(r"ready: 1 models: chat 1")
        done, answers = threading.Event(), list[int]()

        def ask() -> None:
            while not done.wait(0.01):
                answers.append(
                    server.post("/v2/models/chat/generate", {"text_input": "x", "max_tokens": 4}).status_code
                )
                answers.append(
                    server.post("/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": 4}).status_code
                )

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        client = triton_http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60)
        for limit in (512, 1024):
            settings = {"model": "penstock-demo", "max_model_len": limit}
            (tmp_path / "chat" / "1" / "model.json").write_text(json.dumps(settings))
            client.load_model("chat")
            assert server.client().models.retrieve("chat").model_dump()["max_model_len"] == limit
        done.set()
        for thread in asking:
            thread.join()
        assert set(answers) == {200}
        client.unload_model("chat")
        assert server.post("/v1/completions", {"model": "chat", "prompt": "x"}).status_code == 404
        wait_until(lambda: [entry["state"] for entry in client.get_model_repository_index()] == ["UNAVAILABLE"])
        client.close()
