import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Makes the classifier's tensor of an image in the PPM format (P6, 32 x 32)."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0]
        head, pixels = image[:13], image[13:]
        if head != b"P6\n32 32\n255\n" or len(pixels) != 3 * 32 * 32:
            error = pb_utils.TritonError("INPUT is no image of 32 x 32 pixels", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        rows = np.frombuffer(pixels, np.uint8).reshape(32, 32, 3)
        tensor = np.ascontiguousarray(rows.transpose(2, 0, 1), np.float32) / 255
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor)])
