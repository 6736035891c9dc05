import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """As many responses as IN says, each with IN."""

    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for _ in range(given[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
