"""Makes add_sub_onnx/1/model.onnx: OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, over batches of 16 floats.

The file lies in the repository already; this is where it came from. It needs the package onnx.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto, TensorProto, checker, helper

FOLDER = Path(__file__).parent


def add_sub() -> ModelProto:
    def floats(name: str) -> object:
        # a first dimension with a name instead of a number is what tells servers that the model can batch
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16])

    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "add_sub",
        [floats("INPUT0"), floats("INPUT1")],
        [floats("OUTPUT0"), floats("OUTPUT1")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="penstock")
    model.ir_version = 8
    checker.check_model(model)
    return model


if __name__ == "__main__":
    path = FOLDER / "add_sub_onnx" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(add_sub().SerializeToString(deterministic=True))
    print(path)
