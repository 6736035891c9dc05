import asyncio
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails as CODE says: with a TritonError of that name, or in other ways that models fail in; else echoes it."""

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()) for request in requests]

    def answer(self, value):
        code = value.reshape(-1)[0].decode()
        if code == "raise":
            raise ValueError("raised by the model")
        if code == "raise SystemExit":
            sys.exit("the model leaves")
        if code == "raise KeyboardInterrupt":
            raise KeyboardInterrupt("by the model")
        if code == "raise CancelledError":
            raise asyncio.CancelledError("by the model")
        if code == "stub":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.stub(value.shape))])
        if code == "plain":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no code given"))
        if code == "wrong type":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[1]], dtype=np.int32))])
        if code == "wrong shape":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([code] * 6, dtype=np.object_))])
        if code == "no outputs":
            return pb_utils.InferenceResponse([])
        if code == "unknown output":
            return pb_utils.InferenceResponse([pb_utils.Tensor("NOPE", value)])
        if hasattr(pb_utils.TritonError, code):
            error = pb_utils.TritonError(f"failed with {code}", getattr(pb_utils.TritonError, code))
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)])

    def stub(self, shape):
        """What the process shows the model."""
        return np.full(shape, repr((sys.argv, sys.path[0])), np.object_)
