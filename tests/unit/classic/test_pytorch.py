"""The pytorch backend: what the conformance suite does not ask."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from backend_candidates.candidate import LOOKUP
from backend_candidates.pytorch import write_exported, write_script
from penstock.classic.base import BackendInstance, InstanceContext, ModelContext
from penstock.classic.loading import load_model
from penstock.classic.pytorch.backend import PyTorchBackend
from penstock.engines.errors import InvalidRequestError
from support.backends import load, model_config, model_context, run
from support.python_backend import FakeHost, outputs, request


class Sub(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


class SubOfDict(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"difference": tensors["left"] - tensors["right"]}


class Overwrite(torch.nn.Module):
    def forward(self, left: torch.Tensor) -> torch.Tensor:
        return left.add_(1)


class Optional(torch.nn.Module):
    def forward(self, left: torch.Tensor, scale: float = 2.0, right: torch.Tensor | None = None) -> torch.Tensor:
        return left * scale if right is None else left + right


class Sum(torch.nn.Module):
    def forward(self, left: torch.Tensor) -> torch.Tensor:
        return left.sum()


class OfScalars(torch.nn.Module):
    def forward(self, left: torch.Tensor) -> torch.Tensor:
        return torch.stack([left, left + 1])


class Total(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        return self.total.add_(left)


def config(inputs: str, outputs: str = "result", *, dims: str = "[ 2 ]", kind: str = "FP32", more: str = "") -> str:
    """Tensors of these names, all of a shape; an input with a question mark is optional."""
    lines = []
    for name in inputs.split():
        optional = "optional: true" if name.endswith("?") else ""
        lines.append(f'input {{ name: "{name.rstrip("?")}" data_type: TYPE_{kind} dims: {dims} {optional} }}')
    lines += [f'output {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} }}' for name in outputs.split()]
    return "\n".join([*lines, more])


def loaded(folder: Path, module: torch.nn.Module, text: str) -> BackendInstance:
    write_script(folder / "m" / "1", module)
    return load(PyTorchBackend({}), model_config(text), folder / "m" / "1")


LEFT, RIGHT = np.array([5, 7], np.float32), np.array([1, 2], np.float32)


@pytest.mark.parametrize(
    ("module", "left", "right", "result"),
    [
        (Sub, "left", "right", "OUTPUT__0"),
        (Sub, "x__0", "y__1", "anything"),
        (Sub, "first", "second", "anything"),
        (SubOfDict, "left", "right", "difference"),
    ],
    ids=["arguments", "indices", "order", "dictionary"],
)
def test_names_lead_to_arguments(
    tmp_path: Path, module: Callable[[], torch.nn.Module], left: str, right: str, result: str
) -> None:
    names = f"{left} {right}" if left == "first" else f"{right} {left}"
    instance = loaded(tmp_path, module(), config(names, result))
    assert run(instance, **{right: RIGHT, left: LEFT})[result].tolist() == [4, 5]


def test_what_a_request_leaves_out_has_the_model_s_default(tmp_path: Path) -> None:
    instance = loaded(tmp_path, Optional(), config("left right?"))
    assert run(instance, left=LEFT)["result"].tolist() == [10, 14]
    assert run(instance, left=LEFT, right=RIGHT)["result"].tolist() == [6, 9]


@pytest.mark.parametrize("dims", ["[ 1 ]", "[ -1 ]", "[ 1, 1 ]"])
def test_a_result_without_dimensions_is_one_element(tmp_path: Path, dims: str) -> None:
    instance = loaded(tmp_path, Sum(), config("left", dims=dims))
    assert run(instance, left=LEFT)["result"].ravel().tolist() == [12]
    assert run(instance, left=LEFT)["result"].ndim == dims.count("1")


def test_a_program_that_takes_a_scalar_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(OfScalars(), (torch.tensor(1.0),)), folder / "model.pt2")
    instance = load(PyTorchBackend({}), model_config(""), folder)
    assert run(instance, left=np.array([2], np.float32))["OUTPUT__0"].tolist() == [2, 3]


def test_an_answer_is_not_a_buffer_that_the_model_goes_on_writing_to(tmp_path: Path) -> None:
    instance = loaded(tmp_path, Total(), config("left"))
    answers = [run(instance, left=LEFT)["result"] for _ in range(2)]
    assert [answer.tolist() for answer in answers] == [[5, 7], [10, 14]]


def test_a_model_that_writes_to_its_inputs_changes_nobody_else_s(tmp_path: Path) -> None:
    instance = loaded(tmp_path, Overwrite(), config("left"))
    for array in (LEFT.copy(), np.frombuffer(LEFT.tobytes(), np.float32)):
        assert run(instance, left=array)["result"].tolist() == [6, 8]
        assert array.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", ml_dtypes.bfloat16), ("FP16", np.float16), ("UINT8", np.uint8), ("BOOL", np.bool_)]
)
def test_types_come_back_as_they_went_in(tmp_path: Path, kind: str, dtype: Any) -> None:
    instance = loaded(tmp_path, torch.nn.Identity(), config("input", kind=kind))
    array = np.array([0, 1]).astype(dtype)
    found = run(instance, input=array)["result"]
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (config("left"), "argument 'right' of forward\\(\\) has no input"),
        (config("left right more"), "input 'more' would be argument 2 of forward\\(\\), which has 2"),
        (config("left right?"), "input 'right' is optional, and argument 'right' of forward\\(\\) is not"),
        (config("left right", kind="STRING"), "input 'left' is a BYTES, and its argument takes a Tensor"),
        ("", "needs its inputs and outputs in config.pbtxt: 'model.pt' \\(TorchScript\\)"),
        (config("left right", more='parameters { key: "INFERENCE_MODE" value { string_value: "x" } }'), "0 or 1"),
        (
            config("left right", more='parameters { key: "DISABLE_CUDNN" value { string_value: "1" } }'),
            "'DISABLE_CUDNN' is not supported: it would change all models",
        ),
    ],
)
def test_what_does_not_fit_the_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        loaded(tmp_path, Sub(), text)


def test_weights_alone_are_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.save(torch.nn.Linear(2, 2).state_dict(), folder / "model.pt")
    with pytest.raises(ValueError, match=r"'model\.pt' is what torch\.save writes"):
        load(PyTorchBackend({}), model_config(config("left")), folder)


def test_an_error_is_told_without_the_model_s_source(tmp_path: Path) -> None:
    instance = loaded(tmp_path, Sub(), config("left right", dims="[ -1 ]"))
    with pytest.raises(InvalidRequestError) as told:
        run(instance, left=LEFT, right=np.ones(3, np.float32))
    assert told.value.message.startswith("PyTorch execute failure: The size of tensor a (2) must match")
    assert "Traceback" not in told.value.message


def test_instances_share_weights_where_that_is_asked_for(tmp_path: Path) -> None:
    write_script(tmp_path / "m" / "1", Sub())
    backend = PyTorchBackend({})
    for value, same in (("false", False), ("true", True)):
        text = f'parameters {{ key: "ENABLE_WEIGHT_SHARING" value {{ string_value: "{value}" }} }}'
        first, second = two_instances(backend, tmp_path / "m" / "1", config("left right", more=text))
        assert (first._program is second._program) == same


def two_instances(backend: PyTorchBackend, folder: Path, text: str) -> tuple[Any, Any]:
    model = backend.load_model(model_context(model_config(text), folder))
    first, second = (model.load_instance(InstanceContext(name=f"m_0_{n}", kind="CPU")) for n in range(2))
    return first, second


def test_parameters_reach_the_thread_that_executes(tmp_path: Path) -> None:
    keys = {"INTRA_OP_THREAD_COUNT": "1", "DISABLE_OPTIMIZED_EXECUTION": "true", "INFERENCE_MODE": "false"}
    text = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in keys.items())
    instance = loaded(tmp_path, Sub(), config("left right", more=text))
    assert run(instance, left=LEFT, right=RIGHT)["result"].tolist() == [4, 5]
    assert torch.get_num_threads() == 1
    assert torch._C._get_graph_executor_optimize() is False
    torch._C._set_graph_executor_optimize(True)


def test_an_archive_s_own_bounds_count(tmp_path: Path) -> None:
    write_exported(tmp_path / "m" / "1", 1)
    with pytest.raises(ValueError, match="max_batch_size 65 is above the 64 that it was exported for"):
        load(PyTorchBackend({}), model_config("max_batch_size: 65"), tmp_path / "m" / "1")
    wrong = LOOKUP.replace("TYPE_INT64", "TYPE_INT32")
    with pytest.raises(ValueError, match="expects datatype TYPE_INT32 for input 'INDEX', model provides TYPE_INT64"):
        load(PyTorchBackend({}), model_config(wrong), tmp_path / "m" / "1")


MODULE = """
    import torch

    class Base(torch.nn.Module):
        pass

    class PyTorchModel(Base):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.linear(x), x + 1
"""


async def test_a_module_in_python_with_its_weights_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(textwrap.dedent(MODULE))
    torch.save({"linear.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, folder / "model.pt")
    text = config("x", "times plus", more='runtime: "model.py" max_batch_size: 4 dynamic_batching { }')
    found = model_config(text, backend="pytorch")
    backend = PyTorchBackend({})
    backend.auto_complete(found, folder)
    context = ModelContext(
        name="m", version=1, config=found, model_folder=folder.parent, version_folder=folder, host=FakeHost()
    )
    model = await load_model(context, backend)
    try:
        answer = outputs(await model.infer(request(x=np.array([[1, 1], [2, 0]], np.float32))))
        assert answer["times"].tolist() == [[3, 7], [2, 6]]
        assert answer["plus"].tolist() == [[2, 2], [3, 1]]
    finally:
        await model.stop()


def test_other_runtimes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the pytorch backend has no runtime 'net\.so'"):
        load(PyTorchBackend({}), model_config(config("x", more='runtime: "net.so"')), tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (config("x y?"), r"optional inputs are not supported with runtime 'model\.py'"),
        (config("x", kind="STRING"), r"strings are not supported with runtime 'model\.py'"),
    ],
)
def test_what_a_module_in_python_cannot_get_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(PyTorchBackend({}), model_config(text + 'runtime: "model.py"'), tmp_path)


def test_more_threads_than_a_process_can_have_are_refused(tmp_path: Path) -> None:
    more = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "99999999999" } }'
    with pytest.raises(ValueError, match="'INTRA_OP_THREAD_COUNT' must be at most 1024 threads"):
        loaded(tmp_path, Sub(), config("left right", more=more))
