"""MLServer: two models, each with a model-settings.json of its own that names its class here."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class AddSub(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        left, right = inputs["INPUT0"], inputs["INPUT1"]
        outputs = [
            NumpyCodec.encode_output("OUTPUT0", left + right),
            NumpyCodec.encode_output("OUTPUT1", left - right),
        ]
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=outputs)


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        [tensor] = payload.inputs
        output = NumpyCodec.encode_output("OUTPUT0", NumpyCodec.decode_input(tensor))
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=[output])
