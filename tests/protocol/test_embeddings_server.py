"""Whole servers with embedding and ranking models: the official client of OpenAI, and transformers' numbers."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as triton_grpc
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

import support.models
from penstock.engines.encoder.text import TokenizedText
from support.encoders import (
    export_graph,
    make_encoder,
    reference,
    reference_rows,
    sentence_files,
    token_files,
    tokenizer,
)
from support.server import Server, refusal, serving

TEXTS = ["what is the weather in bern?", "a quick brown fox", "rain " * 40]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("encoders")
    return {
        "embedder": make_encoder(base / "embedder", "Bert", files=sentence_files()),
        "scorer": make_encoder(base / "scorer", "XLMRoberta", labels=1),
        "classifier": make_encoder(base / "classifier", "DistilBert", labels=3),
        "decoder": make_decoder(base / "decoder"),
        "tokenwise": make_encoder(base / "tokenwise", "Bert", files=token_files()),
        "exported": make_exported(base / "exported"),
    }


def make_decoder(folder: Path) -> Path:
    """As Qwen3-Embedding is saved: without a head, and names without their beginning."""
    support.models.make_model(folder, "qwen3", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    for path, content in sentence_files("lasttoken").items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return folder


def make_exported(folder: Path) -> Path:
    """A family that is known from its graph alone. Its weights stay, for the comparison; they are not read."""
    make_encoder(folder, "Albert", files=sentence_files())
    export_graph(folder, "onnx")
    return folder


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    beside = [f"--embedding-model={name}={folder}" for name, folder in folders.items()]
    beside.append(f"--data-dir={tmp_path_factory.mktemp('data')}")
    beside.append(f"--model-repository={make_repository(tmp_path_factory.mktemp('repository'))}")
    with serving("penstock-demo", "--dtype", "f32", *beside) as process:
        yield process


ASKER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            [vector, question] = (pb_utils.get_input_tensor_by_name(r, name) for name in ("VECTOR", "QUESTION"))
            inner = pb_utils.InferenceRequest(
                model_name="classifier", requested_output_names=["scores"],
                inputs=[pb_utils.Tensor("text", question.as_numpy())])
            found = inner.exec()
            scores = pb_utils.get_output_tensor_by_name(found, "scores")
            outputs = [pb_utils.Tensor("LENGTH", (vector.as_numpy() ** 2).sum(1, keepdims=True))]
            responses.append(pb_utils.InferenceResponse([*outputs, pb_utils.Tensor("SCORES", scores.as_numpy())]))
        return responses
"""
ASKER_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "VECTOR" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "QUESTION" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "LENGTH" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] }
"""
SEARCH_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input { name: "question" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "length" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }
ensemble_scheduling {
  step {
    model_name: "embedder" model_version: -1
    input_map { key: "text" value: "question" } output_map { key: "embedding" value: "vector" }
  }
  step {
    model_name: "asker" model_version: -1
    input_map { key: "VECTOR" value: "vector" } input_map { key: "QUESTION" value: "question" }
    output_map { key: "LENGTH" value: "length" } output_map { key: "SCORES" value: "scores" }
  }
}
"""


def make_repository(folder: Path) -> Path:
    """An ensemble whose first step is an embedding model, and whose second one asks a classifier."""
    for name, config in (("asker", ASKER_CONFIG), ("search", SEARCH_CONFIG)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "asker" / "1" / "model.py").write_text(ASKER)
    return folder


def tokenized(texts: list[str]) -> list[TokenizedText]:
    return [TokenizedText(ids) for ids in tokenizer()(texts)["input_ids"]]


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def far(found: Any, wanted: Any) -> float:
    return float(np.abs(np.array(found) - wanted).max())


@pytest.mark.parametrize("name", ["embedder", "exported"])
def test_embeddings_are_those_of_transformers(server: Server, folders: dict[str, Path], name: str) -> None:
    wanted = unit(reference_rows(reference(folders[name]), tokenized(TEXTS)))
    client = server.client()
    for encoding in ("float", "base64", openai.omit):
        found = client.embeddings.create(model=name, input=TEXTS, encoding_format=encoding)  # type: ignore[arg-type]
        rows = [each.embedding for each in found.data]
        if encoding == "base64":
            rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]  # type: ignore[arg-type]
        assert far(rows, wanted) < 1e-5
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, tokenized(TEXTS)))
    ids = [list(text.ids) for text in tokenized(TEXTS)]
    assert far([each.embedding for each in client.embeddings.create(model=name, input=ids).data], wanted) < 1e-5


def test_fewer_dimensions_are_the_first_ones_scaled_to_length_1(server: Server) -> None:
    [whole] = server.client().embeddings.create(model="embedder", input="a fox").data
    [short] = server.client().embeddings.create(model="embedder", input="a fox", dimensions=8).data
    assert far([short.embedding], unit(np.array([whole.embedding])[:, :8])) < 1e-6


def test_a_decoder_s_embeddings(server: Server, folders: dict[str, Path]) -> None:
    model = support.models.load_reference(folders["decoder"])
    texts = ["Hello", "What is it?"] * 70  # more than are with the engine at one time
    found = server.client().embeddings.create(model="decoder", input=texts)
    ids = [support.models.make_tokenizer()(text)["input_ids"] for text in texts[:2]]
    with torch.no_grad():
        rows = [model.model(torch.tensor([each])).last_hidden_state[0, -1].numpy() for each in ids]
    assert far([each.embedding for each in found.data], unit(np.stack(rows * 70))) < 1e-4


def pairs(first: str, seconds: list[str]) -> list[TokenizedText]:
    encoded = tokenizer()([first] * len(seconds), seconds)
    return [TokenizedText(ids) for ids in encoded["input_ids"]]


def test_rerank_and_score(server: Server, folders: dict[str, Path]) -> None:
    logits = reference_rows(reference(folders["scorer"]), pairs(TEXTS[0], TEXTS))[:, 0]
    wanted = 1 / (1 + np.exp(-logits))
    scored = server.post("/v1/score", {"model": "scorer", "text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert far([each["score"] for each in scored["data"]], wanted) < 1e-5
    body = {"model": "scorer", "query": TEXTS[0], "documents": TEXTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = server.post(path, body).json()["results"]
        assert [each["index"] for each in results] == np.argsort(-wanted).tolist()
        assert far([each["relevance_score"] for each in results], np.sort(wanted)[::-1]) < 1e-5


def test_classes_have_the_probabilities_of_transformers_and_their_labels(
    server: Server, folders: dict[str, Path]
) -> None:
    logits = reference_rows(reference(folders["classifier"]), tokenized(TEXTS))
    wanted = torch.tensor(logits).softmax(-1).numpy()
    found = server.post("/classify", {"model": "classifier", "input": TEXTS}).json()["data"]
    assert far([each["probs"] for each in found], wanted) < 1e-5
    assert [each["label"] for each in found] == [f"LABEL_{row.argmax()}" for row in wanted]


def texts_tensor(name: str, texts: list[bytes]) -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput(name, [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text] for text in texts], np.object_))
    return tensor


def test_as_models_of_kserve(server: Server, folders: dict[str, Path]) -> None:
    wanted = unit(reference_rows(reference(folders["embedder"]), tokenized(TEXTS)))
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_model_ready("embedder")
        assert not client.is_model_ready("tokenwise"), "its rows have no common shape"
        [output] = client.get_model_metadata("embedder").outputs
        assert (output.name, output.datatype, output.shape[0]) == ("embedding", "FP32", -1)
        found = client.infer("embedder", [texts_tensor("text", [text.encode() for text in TEXTS])])
        assert far(found.as_numpy("embedding"), wanted) < 1e-5
        for name, text, told in (
            ("embedder", b"\xff", "element 0 of input 'text' is not UTF-8"),
            ("embedder", b"rain " * 5000, "tokens"),
        ):
            with pytest.raises(InferenceServerException, match=told) as refused:
                client.infer(name, [texts_tensor("text", [text])])
            assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException, match="prompt_name"):
            client.infer("embedder", [texts_tensor("text", [b"a"])], parameters={"prompt_name": "nothing"})
        [counted] = client.get_inference_statistics("embedder", as_json=True)["model_stats"]
    assert int(counted["inference_count"]) >= 3


def test_public_names_lead_to_them_over_kserve_too(server: Server) -> None:
    text = texts_tensor("text", [b"a quick brown fox"])
    rules = {
        "public": {"targets": [{"model": "embedder"}], "shadow": {"model": "exported"}},
        "tokens": {"targets": [{"model": "tokenwise"}]},
    }
    for name, rule in rules.items():
        assert httpx.put(f"{server.url}/traffic/{name}", json=rule).status_code == 200
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        found = client.infer("public", [text])
        assert found.get_response().model_name == "public"
        assert far(found.as_numpy("embedding"), client.infer("embedder", [text]).as_numpy("embedding")) < 1e-6
        with pytest.raises(InferenceServerException, match="which is not a model of this API"):
            client.infer("tokens", [text])
    assert httpx.get(server.url + "/traffic/public").json()["shadow"] == {"in_flight": 0, "results": {"skipped": 1}}
    for name in rules:
        assert httpx.delete(f"{server.url}/traffic/{name}").status_code == 200


def test_as_steps_of_an_ensemble_and_asked_by_a_model(server: Server, folders: dict[str, Path]) -> None:
    logits = reference_rows(reference(folders["classifier"]), tokenized(TEXTS[:2]))
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        found = client.infer("search", [texts_tensor("question", [text.encode() for text in TEXTS[:2]])])
    assert far(found.as_numpy("length"), np.ones((2, 1))) < 1e-5
    assert far(found.as_numpy("scores"), torch.tensor(logits).softmax(-1).numpy()) < 1e-5


def test_they_stand_beside_the_language_model(server: Server) -> None:
    client = server.client()
    names = [model.id for model in client.models.list()]
    assert names == ["penstock-demo", "embedder", "scorer", "classifier", "decoder", "tokenwise", "exported"]
    hi: Any = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model="penstock-demo", messages=hi, max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="generates no text; see /v1/embeddings"):
        client.chat.completions.create(model="decoder", messages=hi)
    with pytest.raises(openai.BadRequestError, match="generates text and gives no embeddings"):
        client.embeddings.create(model="penstock-demo", input="hi")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nowhere", input="hi")


def test_what_is_measured_and_logged(server: Server) -> None:
    server.client().embeddings.create(model="embedder", input="a fox", extra_headers={"x-request-id": "measured"})
    server.wait_for_log(r"ACCESS +POST /v1/embeddings 200 ok model=embedder tokens=4\+0 .* id=measured")
    shown = httpx.get(server.operator + "/metrics").text
    assert 'penstock_encoder_texts_total{model="embedder"}' in shown
    assert 'penstock_engine_ready{model="scorer"} 1.0' in shown
    assert 'route="/v1/embeddings"' in shown


def test_a_folder_is_known_by_its_files(folders: dict[str, Path]) -> None:
    with serving(str(folders["embedder"]), "--max-model-len", "8", "--served-model-name", "one,two") as server:
        assert [model.id for model in server.client().models.list()] == ["one", "two"]
        assert server.client().embeddings.create(model="two", input="a fox").data
        with pytest.raises(openai.BadRequestError, match="maximum is 8"):
            server.client().embeddings.create(model="one", input=TEXTS[2])
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{embedder}", "--engine", "torch"], "engine: encoders run on openvino"),
        (["{exported}", "--weights", "int8"], "weights: model.onnx is computed with the weights that it has"),
        (["{embedder}", "--device", "cuda"], "device: encoders run on cpu"),
        (["{embedder}", "--chat-template", "x"], "chat-template: this model gives embeddings"),
        (["{embedder}", "--max-model-len", "999"], "--max-model-len 999 is more than the model's 80 tokens"),
        (["--embedding-model", "x={embedder},x={scorer}"], "`x` is taken"),
        (["penstock-demo", "--embedding-model", "penstock-demo={embedder}"], "`penstock-demo` is taken"),
        (["--embedding-model", "/nowhere"], "there is no folder or file /nowhere"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[str], message: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert re.search(message, refusal(caplog, *(flag.format(**folders) for flag in flags)))


def test_a_vector_for_each_token(server: Server) -> None:
    asked = {"model": "tokenwise", "input": ["a quick brown fox", "rain"], "task": "token_embed"}
    answer = server.post("/pooling", asked).json()
    shapes = [np.array(each["data"]).shape for each in answer["data"]]
    assert shapes == [(6, 8), (3, 8)], "with the tokens at both ends"
    assert answer["usage"]["prompt_tokens"] == 9
    alone = server.post("/pooling", asked | {"input": "rain", "encoding_format": "base64", "prompt_name": None}).json()
    rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in alone["data"][0]["data"]]
    assert np.allclose(rows, answer["data"][1]["data"], atol=1e-5)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1)
    prefixed = server.post("/pooling", asked | {"input": "rain", "prompt_name": "query"}).json()
    assert len(prefixed["data"][0]["data"]) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "rain"}),
        ("/v1/rerank", {"query": "rain", "documents": ["rain"]}),
        ("/v1/score", {"text_1": "rain", "text_2": "rain"}),
        ("/api/embed", {"input": "rain"}),
    ],
)
def test_where_one_vector_is_needed_those_of_tokens_are_refused(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    refused = server.post(path, body | {"model": "tokenwise"})
    assert refused.status_code == 400
    assert "gives a vector for each token; see /pooling" in refused.text


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/rerank", {"model": "scorer", "query": "weather", "documents": ["rain", "a brown fox"]}),
        ("/v1/score", {"model": "embedder", "text_1": "weather", "text_2": "rain"}),
        ("/v1/classify", {"model": "classifier", "input": "rain"}),
        *(
            (f"{version}/rerank", {"model": "scorer", "query": "weather", "documents": ["rain"]})
            for version in ("", "/v2")
        ),
        ("/score", {"model": "embedder", "text_1": "weather", "text_2": "rain"}),
        ("/classify", {"model": "classifier", "input": "rain"}),
        ("/pooling", {"model": "embedder", "input": "rain"}),
    ],
)
def test_batches_rank_and_classify(server: Server, endpoint: str, body: dict[str, Any]) -> None:
    client = server.client()
    line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body}).encode()
    file = client.files.create(file=("in.jsonl", line), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="1h")  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while batch.status != "completed":
        assert time.monotonic() < deadline, batch
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    for each in (answer, expected := server.post(endpoint, body).json()):
        del each["id"]
        each.pop("created", None)
    assert answer == expected
