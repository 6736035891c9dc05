"""Forms: the tensors by which clients speak to a language model, the reader of requests and the writer of responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import msgspec
import numpy as np

from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig, datatype_value
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.models import ServedModel
from penstock.gateway.models.language.sampling import (
    NUMBERS,
    SamplingFields,
    bad_words,
    bounded,
    sampling_params,
    stop_strings,
)
from penstock.gateway.models.language.structured_output import grammar_field
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.requests.context import Principal, RequestContext

PROMPT = "text_input"
"""The one input that is not optional."""
_ANY_LENGTH = ([1], [-1])


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request as the model reads it."""

    generate: GenerateRequest
    stream: bool
    prefix: str
    """Stands before the text of each choice: the prompt, unless it is to be left out."""
    returns: frozenset[str]
    """Which outputs beside `text_output` are wanted."""
    logprobs: bool
    """The caller asked for logprobs, not only for their sum."""
    adapter: str | None
    """Name of the model's adapter to use."""


class Writer(Protocol):
    """Writes the responses of one request."""

    def tensors(self, deltas: Sequence[ChoiceDelta | None], prompt_tokens: int) -> list[Tensor]:
        """Of the next response. `deltas`: for each choice what has come since the last one; None: nothing."""
        ...


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Which tensors there are."""

    inputs: Mapping[str, tuple[str, int]]
    """Datatype and dimension."""
    outputs: Mapping[str, tuple[str, int]]
    unserved: Mapping[str, str]
    """Inputs and outputs that a configuration may list and no request may use, with the reason."""
    of_images: Mapping[str, tuple[str, int]] = field(default_factory=dict, kw_only=True)
    """Inputs of models that read images, which others have in `unserved`."""

    def config(self, name: str, backend: str) -> ModelConfig:
        """The configuration that a model shows if its own says nothing."""
        config = ModelConfig(name=name, backend=backend)
        for key, (datatype, dim) in self.inputs.items():
            config.input.add(name=key, data_type=datatype_value(datatype), dims=[dim], optional=key != PROMPT)
        for key, (datatype, dim) in self.outputs.items():
            config.output.add(name=key, data_type=datatype_value(datatype), dims=[dim])
        config.version_policy.latest.num_versions = 1
        config.model_transaction_policy.decoupled = True
        return config

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a configuration with other tensors or with batches."""
        for side, known in (("input", self.inputs), ("output", self.outputs)):
            for item in getattr(config, side):
                if item.name in self.unserved:
                    continue
                datatype, _ = known.get(item.name, ("", 0))
                if not datatype or item.data_type != datatype_value(datatype) or list(item.dims) not in _ANY_LENGTH:
                    raise ValueError(f"{side} '{item.name}' is not one that language models have in that form")
        if config.max_batch_size:
            raise ValueError("language models batch by themselves: max_batch_size must be 0")

    def complete(self, config: ModelConfig) -> None:
        """All tensors of the form, in place; those of `unserved` stay if they were written. Raises ValueError."""
        self.check(config)
        full = self.config(config.name, config.backend)
        for side in ("input", "output"):
            written, known = getattr(config, side), list(getattr(full, side))
            known += [item for item in written if item.name in self.unserved]
            del written[:]
            written.extend(known)
        config.model_transaction_policy.decoupled = True

    def with_images(self) -> Self:
        """Of a model that reads images."""
        unserved = {name: reason for name, reason in self.unserved.items() if name not in self.of_images}
        return replace(self, inputs={**self.inputs, **self.of_images}, unserved=unserved)

    def add_images(self, config: ModelConfig) -> None:
        """Those of `of_images` that the configuration does not list yet."""
        listed = {item.name for item in config.input}
        for name, (datatype, dim) in self.of_images.items():
            if name not in listed:
                config.input.add(name=name, data_type=datatype_value(datatype), dims=[dim], optional=True)

    def check_request(self, request: InferRequest) -> None:
        """Raises UnsupportedError for what a configuration lists for others to use."""
        for name in (*request.inputs, *request.outputs):
            if name in self.unserved:
                raise UnsupportedError(f"'{name}' is not supported: {self.unserved[name]}", param=name)


@dataclass(frozen=True, slots=True)
class Form(TensorForm):
    """Of a model of this server."""

    read: Callable[[InferRequest, ServedModel, str], TextRequest]
    """(request, model, scheduling policy, seconds left). Raises InvalidRequestError, UnsupportedError."""
    writer: Callable[[TextRequest], Writer]
    cancels: Callable[[InferRequest], bool] | None = None
    """Whether this request ends those of the same id instead of generating; None: the form has no such thing."""


def scalar(request: InferRequest, name: str) -> object:
    """The input's only element, None without the input. Raises InvalidRequestError for more or less."""
    tensor = request.inputs.get(name)
    if tensor is None:
        return None
    if tensor.array.size != 1:
        raise InvalidRequestError(f"Expected a scalar tensor for tensor {name}", param=name)
    return tensor.array.item()


def text(request: InferRequest, name: str) -> str | None:
    value = scalar(request, name)
    return None if value is None else decoded(value, name)


def flag(request: InferRequest, name: str) -> bool | None:
    value = scalar(request, name)
    return None if value is None else bool(value)


def requested_outputs(request: InferRequest, returns: Sequence[str]) -> frozenset[str]:
    """Those of `returns` for which `return_<name>` is true, or that the client names as outputs."""
    return frozenset(name for name in returns if flag(request, f"return_{name}") or name in request.outputs)


def decoded(value: object, name: str) -> str:
    """An element of BYTES as text. Raises InvalidRequestError."""
    try:
        return value if isinstance(value, str) else bytes(value).decode()  # type: ignore[call-overload]
    except UnicodeDecodeError:
        raise InvalidRequestError(f"input '{name}' is not valid UTF-8") from None


def strings(name: str, values: Sequence[str | bytes]) -> Tensor:
    array = np.empty(len(values), np.object_)
    array[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return Tensor(name, "BYTES", array)


_MAX_N = 128
_MAX_TOKENS = 2**31 - 1
_MAX_OBJECT_BYTES = 1 << 20

_Fields = TypeVar("_Fields", bound=SamplingFields)


def generate_request(
    request: InferRequest,
    model: ServedModel,
    fields: SamplingFields,
    prompt: str,
    *,
    model_defaults: Mapping[str, Any],
    default_max_tokens: int,
    logprobs: int | None,
    priority: int,
) -> GenerateRequest:
    """Both kinds of defaults are for what `fields` leaves open. Raises InvalidRequestError, UnsupportedError."""
    max_tokens = default_max_tokens if fields.max_tokens is None else fields.max_tokens
    return GenerateRequest(
        model=model.name,
        prompts=[prompt],
        params=sampling_params(
            fields,
            model.info,
            model_defaults,
            max_tokens=bounded(max_tokens, "max_tokens", 1, _MAX_TOKENS),
            logprobs=logprobs,
        ),
        n=1 if fields.n is None else bounded(fields.n, "n", 1, _MAX_N),
        stop=stop_strings(fields.stop),
        bad_words=bad_words(fields.bad_words),
        grammar_field=grammar_field(fields),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
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
    json = text(request, "sampling_parameters")
    if json is None:
        return None
    encoded = json.encode() or b"{}"
    if len(encoded) > _MAX_OBJECT_BYTES:
        raise InvalidRequestError(f"sampling_parameters: they are longer than {_MAX_OBJECT_BYTES} bytes")
    return decode_json(encoded, dict[str, Any], field="sampling_parameters")


def sampling_fields(values: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """Values may be strings. Raises UnsupportedError for a name that `kind` does not have, InvalidRequestError."""
    try:
        return msgspec.convert({name: _typed(name, value) for name, value in values.items()}, kind)
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
