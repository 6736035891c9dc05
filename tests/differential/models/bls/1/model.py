import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


def text(value):
    return np.array([str(value).encode()], dtype=np.object_)


def add(model="add_sub", outputs=("OUTPUT0",), **options):
    inputs = [pb_utils.Tensor(name, np.arange(4, dtype=np.float32)) for name in ("INPUT0", "INPUT1")]
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=inputs, **options)


def repeat(n, fail_at=-1):
    inputs = [pb_utils.Tensor(k, np.array([v], dtype=np.int32)) for k, v in (("N", n), ("FAIL_AT", fail_at))]
    return pb_utils.InferenceRequest(model_name="repeat", requested_output_names=["INDEX"], inputs=inputs)


CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


def show(response):
    if response.has_error():
        error = response.error()
        code = next(name for name in CODES if getattr(pb_utils.TritonError, name) == error.code())
        return f"error {code} {error.message()}"
    return [(t.name(), t.as_numpy().tolist()) for t in response.output_tensors()]


class TritonPythonModel:
    """Calls other models as WHAT says, and shows what came of it."""

    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(r, "WHAT").as_numpy()[0].decode() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text(getattr(self, n)()))]) for n in names]

    def plain(self):
        return show(add(outputs=("OUTPUT1", "OUTPUT0")).exec())

    def version(self):
        return show(add(model_version=1).exec())

    def unknown(self):
        return show(add("nowhere").exec())

    def unknown_version(self):
        return show(add(model_version=7).exec())

    def wrong(self):
        return show(add("strings").exec())

    def failing(self):
        request = pb_utils.InferenceRequest(
            model_name="errors",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("CODE", np.array([[b"NOT_FOUND"]], dtype=np.object_))],
        )
        return show(request.exec())

    def concurrent(self):
        async def both():
            return await asyncio.gather(add().async_exec(), add(outputs=("OUTPUT1",)).async_exec())

        return [show(response) for response in asyncio.run(both())]

    def decoupled(self):
        return [show(response) for response in repeat(3).exec(decoupled=True)]

    def decoupled_failing(self):
        return [show(response) for response in repeat(3, 1).exec(decoupled=True)]

    def decoupled_unary(self):
        try:
            return show(repeat(1).exec())
        except pb_utils.TritonModelException as error:
            return f"raised {error}"

    def ready(self):
        return [pb_utils.is_model_ready(name) for name in ("add_sub", "nowhere")]
