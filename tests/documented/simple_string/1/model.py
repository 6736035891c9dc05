import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums and differences of numbers that are written in digits."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().astype(np.int64)
            for name in ("INPUT0", "INPUT1")
        )
        outputs = {"OUTPUT0": a + b, "OUTPUT1": a - b}
        digits = {name: array.astype(np.bytes_).astype(np.object_) for name, array in outputs.items()}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in digits.items()])
