"""From the sampling parameters of a KServe request, whatever its form, to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.classic.messages import InferRequest
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.front.context import Principal, RequestContext
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.kserve.tensor_form import text
from penstock.gateway.llm.models import ServedModel
from penstock.gateway.llm.sampling import NUMBERS, SamplingFields, bad_words, bounded, sampling_params, stop_strings
from penstock.gateway.llm.structured_output import grammar_field

_MAX_N = 128
_MAX_TOKENS = 2**31 - 1
_MAX_OBJECT_BYTES = 1 << 20

_Fields = TypeVar("_Fields", bound=SamplingFields)


def generate_request(
    request: InferRequest,
    model: ServedModel,
    given: SamplingFields,
    prompt: str,
    *,
    model_defaults: Mapping[str, Any],
    default_max_tokens: int,
    logprobs: int | None,
    priority: int,
) -> GenerateRequest:
    """Both kinds of defaults are for what `given` leaves open. Raises InvalidRequestError, UnsupportedError."""
    max_tokens = default_max_tokens if given.max_tokens is None else given.max_tokens
    return GenerateRequest(
        model=model.name,
        prompts=[prompt],
        params=sampling_params(
            given,
            model.info,
            model_defaults,
            max_tokens=bounded(max_tokens, "max_tokens", 1, _MAX_TOKENS),
            logprobs=logprobs,
        ),
        n=1 if given.n is None else bounded(given.n, "n", 1, _MAX_N),
        stop=stop_strings(given.stop),
        bad_words=bad_words(given.bad_words),
        grammar_field=grammar_field(given),
        include_stop_str_in_output=bool(given.include_stop_str_in_output),
        skip_special_tokens=given.skip_special_tokens is not False,
        priority=priority,
        context=context_of(request),
        tenant=request.tenant,
    )


def context_of(request: InferRequest) -> RequestContext:
    """The front's; requests that models make themselves have none."""
    caller = request.caller
    if isinstance(caller, RequestContext):
        return caller
    return RequestContext(principal=Principal(tenant=request.tenant), deadline=request.deadline)


def sampling_object(request: InferRequest) -> dict[str, Any] | None:
    """What the tensor `sampling_parameters` says, None without one. Raises InvalidRequestError."""
    given = text(request, "sampling_parameters")
    if given is None:
        return None
    encoded = given.encode() or b"{}"
    if len(encoded) > _MAX_OBJECT_BYTES:
        raise InvalidRequestError(f"sampling_parameters: they are longer than {_MAX_OBJECT_BYTES} bytes")
    return decode_json(encoded, dict[str, Any], field="sampling_parameters")


def sampling_fields(given: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """Values may be strings. Raises UnsupportedError for a name that `kind` does not have, InvalidRequestError."""
    try:
        return msgspec.convert({name: _typed(name, value) for name, value in given.items()}, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`") or None
        if problem.startswith("Object contains unknown field"):
            raise UnsupportedError(
                f"The sampling parameter{problem.removeprefix('Object contains unknown field')} is not supported."
            ) from None
        raise InvalidRequestError(f"{name or 'sampling parameters'}: {problem}.", param=name) from None


_KINDS = {**NUMBERS, "logprobs": int, "priority": int}
_JSON = frozenset(
    {
        *("response_format", "structured_outputs", "guided_choice"),
        *("allowed_token_ids", "bad_words", "logits_processors"),
    }
)
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _typed(name: str, value: object) -> object:
    """Triton's clients send parameters as strings, too: "0.5" for a temperature, "true" for a flag."""
    if not isinstance(value, str):
        return value
    if name in _JSON:
        try:
            return decode_json(value.encode(), object)
        except InvalidRequestError:
            raise InvalidRequestError(f"{name}: the text is not JSON, or nests too deep.", param=name) from None
    kind = _KINDS.get(name)
    if kind is not None:
        try:
            return kind(value)
        except ValueError:
            return value
    return _BOOLS.get(value.lower(), value) if name.startswith(("ignore", "include", "skip")) else value
