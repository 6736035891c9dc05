"""Whether this server can do what a configuration asks for: every field is looked up, none is ignored."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.repository.batch_checks import check_batch_tensors
from penstock.gateway.repository.config_checks import check_model, check_tensors, check_warmup
from penstock.gateway.repository.config_fields import FIELDS, OWN_BACKENDS, Fate
from penstock.gateway.repository.sequence_checks import check_sequences


def check_supported(config: ModelConfig, *, complete: bool = True) -> None:
    """Refuses what is not supported, by name, and what cannot be, in Triton's words.

    Call it on what `defaults.complete` has filled in. Until the backend has had its turn as well, `complete=False` lets
    datatypes and dims be missing.

    Raises UnsupportedError for a field, InvalidRequestError for its value.
    """
    _check_no_engines(config)
    for path in sorted(set_paths(config)):
        treatment = FIELDS.get(path)
        if treatment is None or treatment.fate is Fate.REFUSED:
            reason = treatment.reason if treatment else "this server does not know the field"
            raise UnsupportedError(f"{path} of model '{config.name}' is not supported: {reason}", param=path)
        if treatment.only and config.backend in OWN_BACKENDS - treatment.only:
            raise UnsupportedError(_only_for(path, config, treatment.only), param=path)
    try:
        check_model(config)
        check_tensors(config, complete=complete)
        check_batch_tensors(config, complete=complete)
        check_sequences(config)
        check_warmup(config, complete=complete)
    except InvalidRequestError as error:
        raise type(error)(_printable(error.message), param=error.param) from None


_ENGINE_PARAMETERS = ("gpt_model_type", "gpt_model_path", "engine_dir", "batching_strategy", "encoder_model_path")
"""Those by which a configuration of TensorRT-LLM's in-flight batcher backend is known."""


def _check_no_engines(config: ModelConfig) -> None:
    """Says at once what is the matter, before one of the many fields that come with it is found to be unsupported."""
    if config.backend == "tensorrtllm" and any(name in config.parameters for name in _ENGINE_PARAMETERS):
        raise UnsupportedError(
            f"model '{config.name}' is made for TensorRT engines (inflight_batcher_llm), which are not served: write "
            "one of the LLM API layout, whose model.yaml names the Hugging Face model (docs/model_repository.md)",
            param="parameters",
        )


def _only_for(path: str, config: ModelConfig, backends: frozenset[str]) -> str:
    names = ", ".join(sorted(backends))
    return f"{path} of model '{config.name}' is not supported: only for the backend {names}, not {config.backend}"


def set_paths(message: Message, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that differ from their defaults; below a refused one nothing is looked at."""
    for field, value in message.ListFields():
        path = prefix + field.name
        yield path
        treatment = FIELDS.get(path)
        if field.message_type is None or treatment is None or treatment.fate is Fate.REFUSED:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            inner = list(value.values())
        else:
            inner = list(value) if field.is_repeated else [value]
        for item in inner:
            yield from set_paths(item, f"{path}.")


def _printable(text: str) -> str:
    """Names in a configuration may hold anything; messages go into logs."""
    return "".join(char if char.isprintable() else "?" for char in text)[:512]
