"""Requests that nobody has sent: they fill the slots of a batch whose sequences have none."""

from __future__ import annotations

from penstock.classic.call import Call
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.sequences.states import zeros
from penstock.classic.tensors import Tensor


class PaddingCall(Call):
    """Its answers are dropped, and it is in no statistics but the size of its batch."""

    __slots__ = ()

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__(InferRequest(inputs=inputs), 1)
        self.done = True

    def deliver(self, response: InferResponse) -> None:
        pass


class Padding:
    """Inputs of zeros in the shapes of a real request's, made once for requests that are alike."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._inputs: dict[str, Tensor] = {}

    def like(self, call: Call) -> dict[str, Tensor]:
        # Not call.shapes: that leaves out ragged inputs, and one huge request would make all later padding as large.
        shapes = {name: tensor.array.shape for name, tensor in call.request.inputs.items()}
        if shapes != self._shapes:
            self._shapes = shapes
            self._inputs = {
                name: Tensor(name, tensor.datatype, zeros(tensor.array.dtype, tensor.array.shape))
                for name, tensor in call.request.inputs.items()
            }
        return self._inputs
