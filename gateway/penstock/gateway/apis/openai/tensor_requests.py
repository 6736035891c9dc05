"""Requests of the OpenAI API as inputs of a model that takes text as tensors, in the form of Triton's vLLM backend.

What it says about sampling goes to `sampling_parameters`, as JSON, or to inputs of its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.classic.signature import ModelSignature, TensorSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.openai.schemas import ChatRequest, CommonRequest, CompletionRequest
from penstock.gateway.apis.openai.validation import note_hints
from penstock.gateway.models.language.sampling import NUMBERS
from penstock.gateway.requests.context import RequestContext

_PROMPT, _STREAM, OUTPUT, _SAMPLING, _STOPS = (
    "text_input",
    "stream",
    "text_output",
    "sampling_parameters",
    "stop_words",
)
_SWITCHES = {
    "exclude_input_in_output": True,
    "sampling_param_exclude_input_from_output": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_logprobs": False,
}
"""Inputs that say what the answer is to have: a prompt that is to come first (`echo`) is written here."""
_NUMBERS = frozenset(NUMBERS) - {"n"}
"""Fields that may have an input of the same name."""
_SOFT = _NUMBERS - {"min_tokens", "seed"} | {"skip_special_tokens"}
"""Fields that a model without a place for them answers without, and that are noted as ignored."""
_SAMPLED = _NUMBERS | {
    *("stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens"),
}
"""Fields that `sampling_parameters` may have."""
_REFUSED = (
    *("n", "best_of"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "return_token_ids", "suffix"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logits_processors"),
    *("tools", "functions", "documents", "continue_final_message", "store", "cache_salt"),
    *("thinking_token_budget", "max_reasoning_tokens"),
)
"""What would change the answer, and such a model is never asked for."""
_ONE = (None, False, 0, 1)
_HINTS = ("chat_template_kwargs", "prediction", "reasoning_effort", "verbosity", "priority")


def takes_text(signature: ModelSignature) -> bool:
    """Whether a model has these tensors: each of one element, so that a prompt is one text."""
    inputs, output = signature.inputs, signature.outputs.get(OUTPUT)
    required = set(signature.required) - {_PROMPT, _STREAM, _SAMPLING, *_SWITCHES}
    named = [(inputs.get(_PROMPT), "BYTES"), (inputs.get(_STREAM), "BOOL"), (output, "BYTES")]
    return not required and not signature.sequences and all(_is_one(tensor, kind) for tensor, kind in named)


def _is_one(tensor: TensorSignature | None, datatype: str) -> bool:
    return tensor is not None and tensor.datatype == datatype and all(dim in (1, -1) for dim in tensor.dims)


def check_request(request: CommonRequest) -> None:
    """Raises UnsupportedError."""
    if isinstance(request, ChatRequest) and request.tool_choice == "none":
        request.tools = None
    for name in _REFUSED:
        value = getattr(request, name, None)
        if value not in (_ONE if name in ("n", "best_of") else (None, False, 0, "", [])):
            raise _cannot(name)
    form = request.response_format
    if form is not None and form.type != "text":
        raise _cannot("response_format")


def _cannot(name: str) -> UnsupportedError:
    return UnsupportedError(f"{name}: a model that is asked by tensors cannot do this.", param=name)


def note_ignored(request: CommonRequest, context: RequestContext) -> None:
    """Hints that such a model is never told of."""
    note_hints(request, context)
    for name in _HINTS:
        if getattr(request, name, None):
            context.ignore(name, "this model has no input for it.")


def only_prompt(request: CompletionRequest) -> str:
    """Raises UnsupportedError."""
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]  # type: ignore[assignment]
    if not isinstance(prompt, str):
        raise UnsupportedError("prompt: a model that is asked by tensors takes one text.", param="prompt")
    return prompt


def echoed_prompt(request: CommonRequest, prompt: str) -> str:
    return prompt if request.echo and isinstance(request, CompletionRequest) else ""


def plain_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """For models without a chat template: a single message as it is, several with their roles, each on its lines."""
    texts = [(message["role"], _content(message)) for message in messages]
    if len(texts) == 1:
        return texts[0][1]
    return "".join(f"{role}: {text}\n" for role, text in texts) + "assistant:"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content)
    return content or ""


def tensor_inputs(
    signature: ModelSignature, request: CommonRequest, prompt: str, context: RequestContext
) -> dict[str, Tensor]:
    """Raises InvalidRequestError, UnsupportedError."""
    values: dict[str, Any] = {_PROMPT: prompt.encode(), _STREAM: bool(request.stream) and signature.decoupled}
    values |= _SWITCHES
    sampling = _sampling(request)
    if _SAMPLING in signature.inputs:
        values[_SAMPLING] = msgspec.json.encode(sampling)
    else:
        values |= _fields_as_inputs(signature, sampling, context)
    return {
        name: _tensor(signature, signature.inputs[name], value)
        for name, value in values.items()
        if name in signature.inputs
    }


def _sampling(request: CommonRequest) -> dict[str, Any]:
    """What the request says, by vLLM's names."""
    fields = {name: getattr(request, name) for name in _SAMPLED}
    most = getattr(request, "max_completion_tokens", None)
    fields["max_tokens"] = request.max_tokens if most is None else most
    if isinstance(request.stop, str):
        fields["stop"] = [request.stop]
    open_ended = [name for name in ("max_tokens", "seed") if fields[name] == -1]
    return {name: value for name, value in sorted(fields.items()) if value is not None and name not in open_ended}


def _fields_as_inputs(
    signature: ModelSignature, sampling: Mapping[str, Any], context: RequestContext
) -> dict[str, Any]:
    """Stop strings hold anyway: the answer is cut here. Raises UnsupportedError."""
    inputs: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in ("stop", "include_stop_str_in_output"):
            inputs[_STOPS] = [text.encode() for text in sampling.get("stop", ())]
        elif name in _NUMBERS and name in signature.inputs:
            inputs[name] = value
        elif name in _SOFT:
            context.ignore(name, "this model has no input for it.")
        elif value or name == "seed":
            raise UnsupportedError(f"{name}: this model has no input for it.", param=name)
    return inputs if inputs.get(_STOPS) else {name: value for name, value in inputs.items() if name != _STOPS}


def _tensor(signature: ModelSignature, tensor: TensorSignature, value: Any) -> Tensor:
    """In the least shape that holds it. Raises InvalidRequestError for numbers that the datatype cannot hold."""
    values = value if isinstance(value, list) else [value]
    dims = [1 if dim < 0 else dim for dim in tensor.dims]
    if dims and tensor.dims[-1] < 0:
        dims[-1] = len(values)
    shape = (*([1] if signature.batched else []), *dims)
    try:
        with np.errstate(over="raise"):
            array = np.array(values, tensor.dtype).reshape(shape)
    except (OverflowError, FloatingPointError, ValueError, TypeError):
        message = f"{tensor.name}: the model takes {tensor.datatype} of shape {list(shape)}."
        raise InvalidRequestError(message, param=tensor.name) from None
    return Tensor(tensor.name, tensor.datatype, array)
