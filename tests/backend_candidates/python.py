from __future__ import annotations

from pathlib import Path

from backend_candidates.candidate import (
    DECOUPLED,
    LOOKUP,
    STRINGS,
    TABLE_ROWS,
    Candidate,
    Extra,
    beyond_the_table,
    lookup_answer,
    lookup_rows,
)

_HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils


def read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


class TritonPythonModel:
"""

_LOOKUP = """
    @staticmethod
    def auto_complete_config(config):
        for name, data_type, dims in (("INPUT0", "TYPE_FP32", [4]), ("INDEX", "TYPE_INT64", [1])):
            config.add_input({"name": name, "data_type": data_type, "dims": dims})
        for name in ("OUTPUT0", "OUTPUT1"):
            config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        self.table = np.arange(ROWS, dtype=np.float32)

    def execute(self, requests):
        responses = []
        for request in requests:
            row = self.table[read(request, "INDEX")]
            given = read(request, "INPUT0")
            outputs = [pb_utils.Tensor("OUTPUT0", given * np.float32(NUMBER) + row)]
            responses.append(pb_utils.InferenceResponse([*outputs, pb_utils.Tensor("OUTPUT1", given - row)]))
        return responses
"""

_STRINGS = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", read(r, "INPUT0"))]) for r in requests]
"""

_DECOUPLED = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(read(request, "INPUT0")[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def _write(folder: Path, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(_HEAD + body)


def _write_lookup(folder: Path, number: int) -> None:
    _write(folder, _LOOKUP.replace("NUMBER", str(number)).replace("ROWS", str(TABLE_ROWS)))


CANDIDATE = Candidate(
    backend="python",
    write=_write_lookup,
    config=LOOKUP,
    sparse="",
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_broken=lambda folder: _write(folder, "    this is no Python"),
    strings=Extra(write=lambda folder: _write(folder, _STRINGS), config=STRINGS),
    decoupled=Extra(write=lambda folder: _write(folder, _DECOUPLED), config=DECOUPLED),
)
