"""The tensorflow backend: signatures and tags, GraphDefs, sessions, strings, and the choice of the runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import InstanceContext
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensorflow.backend import TensorFlowBackend
from penstock.engines.errors import InvalidRequestError
from support.backends import load, model_config, model_context, run

tf = pytest.importorskip("tensorflow")

GIVEN = np.arange(6, dtype=np.float32).reshape(2, 3)


def parameters(**values: object) -> str:
    texts = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items())
    return 'backend: "tensorflow" ' + " ".join(texts)


def configured(text: str = "", **values: object) -> ModelConfig:
    return model_config(parameters(**values) + text)


def function(factor: float, shape: list[int | None] | None = None) -> Any:
    @tf.function(input_signature=[tf.TensorSpec(shape or [None, 3], tf.float32, name="x")])
    def times(x: Any) -> Any:
        return {"y": x * factor, "z": x + factor}

    return times


def save(folder: Path, **signatures: Any) -> None:
    tf.saved_model.save(tf.Module(), str(folder / "model.savedmodel"), signatures=signatures)


def test_the_signature_completes_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, serving_default=function(2))
    config = configured()
    instance = load(TensorFlowBackend({"default-max-batch-size": "16"}), config, tmp_path)
    assert config.max_batch_size == 16
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("x", [3])]
    assert [(tensor.name, list(tensor.dims)) for tensor in config.output] == [("y", [3]), ("z", [3])]
    found = run(instance, x=GIVEN)
    np.testing.assert_array_equal(found["y"], GIVEN * 2)
    assert list(run(instance, ("z",), x=GIVEN)) == ["z"]


def test_the_signature_is_chosen(tmp_path: Path) -> None:
    save(tmp_path, serving_default=function(2), thrice=function(3))
    instance = load(TensorFlowBackend({}), configured(TF_SIGNATURE_DEF="thrice"), tmp_path)
    np.testing.assert_array_equal(run(instance, x=GIVEN)["y"], GIVEN * 3)
    with pytest.raises(ValueError, match=r"'other'.*only serving_default, thrice"):
        load(TensorFlowBackend({}), configured(TF_SIGNATURE_DEF="other"), tmp_path)
    with pytest.raises(ValueError, match=r"'gpu'.*only serve"):
        load(TensorFlowBackend({}), configured(TF_GRAPH_TAG="gpu"), tmp_path)


def test_strings_are_bytes(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.string, name="x")])
    def exclaimed(x: Any) -> Any:
        return {"y": tf.strings.join([x, "!"])}

    save(tmp_path, serving_default=exclaimed)
    instance = load(TensorFlowBackend({}), configured(), tmp_path)
    given = np.array([["é".encode()], [b"\xff\0"]], np.object_)
    assert run(instance, x=given)["y"].tolist() == [["é!".encode()], [b"\xff\0!"]]


@pytest.mark.parametrize("runtime", ["tensorflow", "openvino"])
def test_ragged_inputs_come_with_their_sizes(tmp_path: Path, runtime: str) -> None:
    specs = [tf.TensorSpec([None], tf.float32, name="x"), tf.TensorSpec([None], tf.float32, name="sizes")]

    @tf.function(input_signature=specs)
    def mean(x: Any, sizes: Any) -> Any:
        return {"y": tf.reshape(tf.reduce_sum(x) / sizes, [-1, 1])}

    save(tmp_path, serving_default=mean)
    text = """max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_FP32 source_input: "x" }"""
    instance = load(TensorFlowBackend({}), configured(text, TF_RUNTIME=runtime), tmp_path)
    found = run(instance, x=np.float32([1, 2, 3]), sizes=np.float32([1, 2]))
    assert found["y"].tolist() == [[6], [3]]


def graph_def(folder: Path) -> None:
    """y is x plus a variable, which an operation called `start` sets to 5."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        variable = v1.get_variable("v", initializer=5.0, use_resource=False)
        tf.add(x, variable, name="y")
        tf.group(variable.initializer, name="start")
    (folder / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())


GRAPH_DEF = """platform: "tensorflow_graphdef" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }"""


@pytest.mark.parametrize("in_model_folder", [False, True])
def test_a_graph_def_is_initialized_by_its_file(tmp_path: Path, in_model_folder: bool) -> None:
    version = tmp_path / "1"
    version.mkdir()
    graph_def(version)
    place = tmp_path if in_model_folder else version
    (place / "init_ops.json").write_text(json.dumps({"init_ops": ["start"]}))
    instance = load(TensorFlowBackend({}), configured(GRAPH_DEF, TF_INIT_OPS_FILE="init_ops.json"), version)
    np.testing.assert_array_equal(run(instance, x=GIVEN)["y"], GIVEN + 5)


def test_a_graph_def_must_be_described(tmp_path: Path) -> None:
    graph_def(tmp_path)
    with pytest.raises(ValueError, match="GraphDef"):
        load(TensorFlowBackend({}), configured('platform: "tensorflow_graphdef"'), tmp_path)
    with pytest.raises(ValueError, match="no tensor 'w'"):
        load(TensorFlowBackend({}), configured(GRAPH_DEF.replace('"x"', '"w"')), tmp_path)


def test_instances_share_as_many_sessions_as_the_configuration_says(tmp_path: Path) -> None:
    save(tmp_path, serving_default=function(2))
    for share, sessions in ((1, 4), (3, 2), (4, 1)):
        config = configured(MAX_SESSION_SHARE_COUNT=share)
        backend = TensorFlowBackend({})
        backend.auto_complete(config, tmp_path)
        model: Any = backend.load_model(model_context(config, tmp_path))
        instances = [model.load_instance(InstanceContext(name=f"m_0_{n}", kind="CPU")) for n in range(4)]
        assert len({id(instance._graph.session) for instance in instances}) == sessions
        model.unload()


def test_what_an_operator_refuses_is_the_callers_fault(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.int32, name="x")])
    def looked_up(x: Any) -> Any:
        return {"y": tf.gather(tf.constant([1.0, 2.0]), x)}

    save(tmp_path, serving_default=looked_up)
    instance = load(TensorFlowBackend({}), configured(), tmp_path)
    with pytest.raises(InvalidRequestError, match=r"indices\[0,0\] = 7 is not in \[0, 2\)$"):
        run(instance, x=np.array([[7]], np.int32))


def test_the_model_or_the_option_chooses_the_runtime(tmp_path: Path) -> None:
    save(tmp_path, serving_default=function(2))
    chosen = [
        load(TensorFlowBackend(options), configured(**values), tmp_path)
        for options, values in (
            ({}, {}),
            ({"runtime": "openvino"}, {}),
            ({"runtime": "openvino"}, {"TF_RUNTIME": "tensorflow"}),
            ({}, {"TF_RUNTIME": "openvino"}),
        )
    ]
    kinds = [type(instance).__name__ for instance in chosen]
    assert kinds == ["TensorFlowInstance", "OpenVINOInstance", "TensorFlowInstance", "OpenVINOInstance"]
    for instance in chosen:
        np.testing.assert_allclose(run(instance, x=GIVEN)["y"], GIVEN * 2)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"TF_RUNTIME": "torch"}, "TF_RUNTIME"),
        ({"TF_NUM_INTRA_THREADS": "-1"}, "TF_NUM_INTRA_THREADS"),
        ({"TF_USE_PER_SESSION_THREADS": "maybe"}, "TF_USE_PER_SESSION_THREADS"),
        ({"TF_INIT_OPS_FILE": "../other.json"}, "TF_INIT_OPS_FILE"),
        ({"TF_INIT_OPS_FILE": "missing.json"}, "missing.json"),
        ({"TF_RUNTIME": "openvino", "TF_SIGNATURE_DEF": "x"}, "TF_SIGNATURE_DEF"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, values: dict[str, str], named: str) -> None:
    save(tmp_path, serving_default=function(2))
    with pytest.raises(ValueError, match=named):
        load(TensorFlowBackend({}), configured(**values), tmp_path)


@pytest.mark.parametrize("options", [{"version": "1"}, {"other": "1"}, {"gpu-memory-fraction": "much"}])
def test_options_that_cannot_be_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TensorFlowBackend(options)
