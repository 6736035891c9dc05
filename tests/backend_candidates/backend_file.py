"""A backend that is a file beside the model's configuration."""

from __future__ import annotations

from pathlib import Path

from backend_candidates.candidate import (
    DECOUPLED,
    LOOKUP,
    MAX_BATCH_SIZE,
    STRINGS,
    Candidate,
    Extra,
    beyond_the_table,
    lookup_answer,
    lookup_rows,
)

_HEAD = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import datatype_value
from penstock.classic.tensors import Tensor


@dataclass
class Model(BackendModel):
    number: np.float32
    table: np.ndarray

    def load_instance(self, context):
        return Instance(self)
"""

_LOOKUP = """
class Lookup(Backend):
    def auto_complete(self, config, version_folder):
        if not config.input:
            config.input.add(name="INPUT0", data_type=datatype_value("FP32"), dims=[4])
            config.input.add(name="INDEX", data_type=datatype_value("INT64"), dims=[1])
        if not config.output:
            for name in ("OUTPUT0", "OUTPUT1"):
                config.output.add(name=name, data_type=datatype_value("FP32"), dims=[4])
        config.dynamic_batching.SetInParent()

    def load_model(self, context):
        number, rows = (context.version_folder / "numbers.txt").read_text().split()
        return Model(np.float32(number), np.repeat(np.arange(int(rows), dtype=np.float32)[:, None], 4, axis=1))


class Instance(BackendInstance):
    def __init__(self, model):
        self.model = model

    def execute(self, batch):
        feed = batch.gather()
        row = self.model.table[feed["INDEX"][:, 0]]
        batch.scatter({"OUTPUT0": feed["INPUT0"] * self.model.number + row, "OUTPUT1": feed["INPUT0"] - row})

    def unload(self):
        del self.model
"""

_STRINGS = """
class Echo(Backend):
    def load_model(self, context):
        return Model(0, None)


class Instance(BackendInstance):
    def __init__(self, model):
        pass

    def execute(self, batch):
        batch.scatter({"OUTPUT0": batch.gather()["INPUT0"]})
"""

_DECOUPLED = """
class Repeat(Backend):
    def load_model(self, context):
        return Model(0, None)


class Instance(BackendInstance):
    def __init__(self, model):
        pass

    def execute(self, batch):
        for call in batch.calls:
            for number in range(call.request.inputs["INPUT0"].array[0]):
                tensor = Tensor("OUTPUT0", "INT32", np.array([number], np.int32))
                call.send(InferResponse([tensor], final=False))
            call.send(InferResponse(None))
"""


def _write(folder: Path, code: str, number: int = 1, rows: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "backend.py").write_text(_HEAD + code)
    (folder / "numbers.txt").write_text(f"{number} {rows}")


CANDIDATE = Candidate(
    backend="lookup",
    write=lambda folder, number: _write(folder, _LOOKUP, number),
    config=LOOKUP,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_broken=lambda folder: _write(folder, "class Backend(Backend) pass"),
    strings=Extra(write=lambda folder: _write(folder, _STRINGS), config=STRINGS),
    decoupled=Extra(write=lambda folder: _write(folder, _DECOUPLED), config=DECOUPLED),
)
