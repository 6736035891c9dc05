"""The dali backend over a stand-in for DALI's pipelines: what each request gets, and what follows a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.classic.dali.backend import DaliInstance
from penstock.classic.dali.definition import read_definition
from penstock.classic.tensors import Array
from penstock.engines.errors import InvalidRequestError
from support.backends import RecordedBatch, RecordedCall, model_config, run

CONFIG = """max_batch_size: 8
    input { name: "FILE" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "BYTES" data_type: TYPE_UINT8 dims: [ -1 ] }"""


class Tensors:
    def __init__(self, samples: Sequence[Array]) -> None:
        self.samples = samples

    def as_cpu(self) -> Tensors:
        return self

    def is_dense_tensor(self) -> bool:
        return len({sample.shape for sample in self.samples}) == 1

    def as_array(self) -> Array:
        return np.stack(list(self.samples))

    def at(self, place: int) -> Array:
        return self.samples[place]

    def __len__(self) -> int:
        return len(self.samples)


class Pipeline:
    """Gives back what it is fed; after an empty file it is of no use any more, as DALI's."""

    def __init__(self) -> None:
        self.broken = False

    def feed_input(self, name: str, samples: Sequence[Array]) -> None:
        self.samples = samples

    def run(self) -> Any:
        self.broken = self.broken or not all(len(sample) for sample in self.samples)
        if self.broken:
            raise RuntimeError(
                "Critical error in pipeline:\nError in CPU operator `nvidia.dali.fn.decoders.image`,\nwhich was used"
                ' in\n\n  File "/home/me/pipe.py", line 10\n\nencountered:\n\nno picture\nCurrent pipeline object is no'
                " longer valid."
            )
        return (Tensors(self.samples),)


def instance(config: str = CONFIG, *split: str) -> DaliInstance:
    return DaliInstance(Pipeline, model_config(config), frozenset(split))


def files(*contents: bytes) -> RecordedCall:
    return RecordedCall({"FILE": np.array([[content] for content in contents], np.object_)})


def answered(call: RecordedCall) -> list[Any]:
    return [tensor.array.tolist() for response in call.responses for tensor in response.outputs or ()]


def test_files_of_all_lengths_share_a_batch() -> None:
    calls = [files(b"\x01\x02", b"\x03\x04"), files(b"\x05"), files(b"\x06", b"\x07\x08")]
    instance().execute(RecordedBatch(*calls))
    assert [answered(call) for call in calls] == [[[[1, 2], [3, 4]]], [[[5]]], []]
    assert isinstance(calls[2].error, InvalidRequestError)
    assert "[1] and [2]" in str(calls[2].error)


def test_samples_are_split_along_their_first_dimension() -> None:
    call = files(b"\x01", b"\x02\x03")
    instance(CONFIG, "BYTES").execute(RecordedBatch(call))
    assert answered(call) == [[1, 2, 3]]


def test_a_pipeline_that_failed_is_built_again() -> None:
    found = instance()
    with pytest.raises(InvalidRequestError, match=r"^model 'm' failed: fn\.decoders\.image: no picture$"):
        run(found, FILE=np.array([[b""]], np.object_))
    assert run(found, FILE=np.array([[b"\x01"]], np.object_))["BYTES"].tolist() == [[1]]


@pytest.mark.parametrize("data", [b"", b"no pipeline", b"\x10\x04", b"\xff" * 40])
def test_what_is_no_pipeline_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no serialized DALI pipeline"):
        read_definition(data)
