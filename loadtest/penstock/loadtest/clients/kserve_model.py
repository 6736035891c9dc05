"""A KServe model as load clients see it: its metadata, and the inputs that language models take."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.discover import ask
from penstock.loadtest.clients.http_client import encode
from penstock.loadtest.errors import UNREADABLE, LoadTestError
from penstock.loadtest.messages import Call


class TensorMetadata(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int] = []


class ModelMetadata(msgspec.Struct):
    """Of GET /v2/models/M, or of the RPC ModelMetadata."""

    inputs: list[TensorMetadata] = []


async def model_metadata(options: ClientOptions) -> ModelMetadata:
    """Raises LoadTestError when the server has none of this model."""
    if not options.model:
        raise LoadTestError("model: choose one with --model")
    answer = await ask(options, f"/v2/models/{quote(options.model, safe='')}")
    if answer.status != 200:
        raise LoadTestError(f"{options.url} has no metadata of the model {options.model!r} (status {answer.status})")
    try:
        return msgspec.json.decode(answer.body, type=ModelMetadata, strict=False)
    except UNREADABLE as error:
        raise LoadTestError(f"the metadata of the model {options.model!r} are none: {error}") from None


# The inputs by which KServe clients ask language models: those of Triton's vLLM and TensorRT-LLM backends.
#
# Sources: triton-inference-server/vllm_backend (docs/additional_outputs.md, src/utils/request.py) and triton-
# inference-server/tensorrtllm_backend (README, "ensemble" and "tensorrt_llm_bls").

SAMPLING = "sampling_parameters"
TEXT, TOKENS, PROMPT_TOKENS = "text_output", "num_output_tokens", "num_input_tokens"
_COUNTS = ("return_num_output_tokens", "return_num_input_tokens")


class LanguageForm:
    """Which inputs a model has, and what is put into them."""

    def __init__(self, options: ClientOptions, metadata: ModelMetadata) -> None:
        """Raises LoadTestError for a model that has none of the known forms, and for what its form cannot say."""
        self.inputs = {tensor.name: tensor for tensor in metadata.inputs}
        self._options = options
        self._extra = dict(options.extra)
        self._vllm = SAMPLING in self.inputs
        if "text_input" not in self.inputs or not (self._vllm or "max_tokens" in self.inputs):
            raise LoadTestError(
                f"the model {options.model!r} does not take text_input with {SAMPLING} or max_tokens, as language "
                f"models of Triton do, but {', '.join(self.inputs) or 'nothing'}"
            )
        if options.ignore_eos and not self._vllm:
            raise LoadTestError(f"ignore-eos: {options.model!r} has no input that says so; --no-ignore-eos")
        sampling = self._extra.pop(SAMPLING, {})
        if not isinstance(sampling, dict) or (sampling and not self._vllm):
            raise LoadTestError(f"extra: {SAMPLING} is an object, of models that have such an input")
        self._sampling: dict[str, Any] = sampling

    def values(self, call: Call) -> dict[str, Any]:
        """By the names of the inputs, with the user's own (`extra`, where null leaves one out)."""
        if not isinstance(call.prompt, str):
            raise LoadTestError("text_input is text: neither messages nor token ids can be sent")
        options = self._options
        values: dict[str, Any] = {"text_input": call.prompt, "stream": options.stream}
        if self._vllm:
            sampling: dict[str, Any] = {"max_tokens": call.output_tokens, "ignore_eos": options.ignore_eos}
            values[SAMPLING] = encode(sampling | self._sampling).decode()
        else:
            values |= {"max_tokens": call.output_tokens, "bad_words": "", "stop_words": ""}
        values |= dict.fromkeys(("exclude_input_in_output", *_COUNTS), True)
        known = {name: value for name, value in values.items() if name in self.inputs}
        return {name: value for name, value in (known | self._extra).items() if value is not None}
