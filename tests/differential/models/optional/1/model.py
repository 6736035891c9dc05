import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 + INPUT1 + BIAS, which may be left out."""

    def execute(self, requests):
        return [self.answer({t.name(): t.as_numpy() for t in request.inputs()}) for request in requests]

    def answer(self, values):
        total = values["INPUT0"] + values["INPUT1"] + values.get("BIAS", 0)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", total)])
