"""Forests, SavedModels and DALI pipelines on a real server, with Triton's own clients. Needs heavy packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from penstock.classic.tensors import Array
from support.server import Server, serving

lightgbm = pytest.importorskip("lightgbm")
tensorflow = pytest.importorskip("tensorflow")
pytest.importorskip("nvidia.dali")

from support.dali import decoder, png  # noqa: E402

ROWS = np.random.default_rng(0).random((200, 4), np.float32)


def write_forest(folder: Path) -> Any:
    (folder / "1").mkdir(parents=True)
    model = lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(ROWS, ROWS.sum(1)), 5)
    model.save_model(folder / "1" / "model.txt")
    (folder / "config.pbtxt").write_text('backend: "fil"\nmax_batch_size: 64')
    return model


def write_saved_model(folder: Path) -> None:
    @tensorflow.function(input_signature=[tensorflow.TensorSpec([None, 4], tensorflow.float32, name="x")])
    def halved(x: Any) -> Any:
        return {"y": x / 2}

    tensorflow.saved_model.save(tensorflow.Module(), str(folder / "1" / "model.savedmodel"), signatures=halved)


def write_decoder(folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.dali").write_bytes(decoder().serialize())
    files = 'input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }'
    pixels = 'output { name: "PIXELS" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }'
    (folder / "config.pbtxt").write_text(f'backend: "dali"\nmax_batch_size: 8\n{files}\n{pixels}')


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("repository")
    model = write_forest(folder / "forest")
    write_saved_model(folder / "halved")
    write_decoder(folder / "decoder")
    return folder, model


@pytest.fixture(scope="module")
def server(repository: tuple[Path, Any]) -> Iterator[Server]:
    with serving("--model-repository", str(repository[0])) as server:
        server.wait_for_log(r"ready: 3 models: decoder 1, forest 1, halved 1", 120)
        yield server


def ask(server: Server, protocol: str, model: str, **inputs: Array) -> Any:
    module: Any = triton_http if protocol == "http" else triton_grpc
    address = server.url.removeprefix("http://") if protocol == "http" else server.grpc
    with module.InferenceServerClient(address) as client:
        sent = []
        for name, array in inputs.items():
            sent.append(module.InferInput(name, list(array.shape), "BYTES" if array.dtype.hasobject else "FP32"))
            sent[-1].set_data_from_numpy(array)
        return client.infer(model, sent)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_get_what_the_libraries_answer(server: Server, repository: tuple[Path, Any], protocol: str) -> None:
    forest = ask(server, protocol, "forest", input__0=ROWS[:50]).as_numpy("output__0")
    np.testing.assert_array_equal(forest[:, 0], repository[1].predict(ROWS[:50]).astype(np.float32))
    np.testing.assert_array_equal(ask(server, protocol, "halved", x=ROWS[:4]).as_numpy("y"), ROWS[:4] / 2)
    pixels = ask(server, protocol, "decoder", IMAGE=np.array([[png(7, 5)]], np.object_)).as_numpy("PIXELS")
    np.testing.assert_array_equal(pixels, np.tile(np.uint8([10, 20, 30]), (1, 5, 7, 1)))


def test_what_is_no_picture_is_the_callers_fault(server: Server) -> None:
    with pytest.raises(triton_http.InferenceServerException, match=r"decoders\.image") as refused:
        ask(server, "http", "decoder", IMAGE=np.array([[b"no picture"]], np.object_))
    assert refused.value.status() == "400"


def test_they_are_checked_without_a_server(repository: tuple[Path, Any]) -> None:
    command = [sys.executable, "-m", "penstock.gateway.cli", "check", str(repository[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "works" in line][:3]


@pytest.mark.parametrize("module", ["fil", "tensorflow", "dali"])
def test_a_backend_imports_its_library_with_its_first_model(module: str) -> None:
    libraries = "{'xgboost', 'lightgbm', 'treelite', 'tensorflow', 'nvidia'}"
    code = f"import sys, penstock.classic.{module}.backend; print({libraries} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
