"""`penstock.LLM`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.commands.offline.answering import Answering, OfflineModel
from penstock.gateway.commands.offline.loop_thread import AnswerStream, LoopThread
from penstock.gateway.commands.offline.outputs import Answer
from penstock.gateway.commands.offline.parameters import (
    chat_request,
    completion_request,
    conversations,
    embedding_request,
    prompt_list,
)
from penstock.gateway.configuration.config import SECTIONS, Config, overlay
from penstock.gateway.configuration.sections.language_model import DoorConfig, ModelSettings

_SECTIONS = [kind for name in ModelSettings.__struct_fields__ if (kind := SECTIONS[name]) is not DoorConfig]
_OF_SERVERS = {"model", "served_model_name", "lora_directory", "max_queued_requests", "max_queued_tokens"}
_OTHERS = {"clamp_max_tokens", "embedding_batch_tokens", "load_timeout", "log_level", "watchdog_timeout"}
OPTIONS = frozenset({name for section in _SECTIONS for name in section.__struct_fields__} - _OF_SERVERS | _OTHERS)
_DEFAULTS: Mapping[str, Any] = {
    "log_level": "warning",
    # One program has one queue, which `LLM` keeps short itself.
    "max_queued_requests": sys.maxsize,
    "max_queued_tokens": sys.maxsize,
}


def read_options(model: str | None, options: Mapping[str, Any]) -> Config:
    """Raises TypeError for a name that is no option, ConfigError for a value that cannot be."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"LLM has no option {name!r}")
    return overlay(Config(), {**_DEFAULTS, **options, "model": model})


Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A text, the token ids of one, or several of these."""
Messages = Sequence[Mapping[str, Any]]
_TEXTS_TOGETHER = 256


class LLM:
    """A model in this program, on the same engines and scheduler as in a server, without ports.

    It may be used by several threads at the same time, and where an event loop runs, as in a notebook. Close it, or use
    it in a `with` statement, to give back the memory; at the program's end that happens by itself.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Returns when `model`, a folder or a hub id, is loaded; without one, the built-in demo model. `options` are a
        server's settings of models and engines, as in `max_model_len=4096`.

        Raises TypeError for an unknown option, ConfigError for a value that cannot be, PenstockError.
        """
        config = read_options(None if model is None else str(model), options)
        self._host = OfflineModel(config)
        self._answering = Answering(self._host)
        self._thread = LoopThread(self._host.stop)
        self._end = weakref.finalize(self, self._thread.close)
        try:
            self._thread.run(self._host.start())
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Prompts, *, adapter: str | None = None, **parameters: Any) -> list[Answer]:
        """An answer for each prompt, in their order; `parameters` are those of /v1/completions, as in `max_tokens=64,
        temperature=0.0`. The first error ends the call. Raises TypeError, PenstockError."""
        self._must_generate()
        several = prompt_list(prompts)
        if not several:
            return []
        first = completion_request(adapter or self._host.name, several[0], parameters)
        requests = [msgspec.structs.replace(first, prompt=prompt) for prompt in several]
        return self._thread.run(self._answering.completions(requests))

    def chat(
        self, messages: Messages | Sequence[Messages], *, adapter: str | None = None, **parameters: Any
    ) -> list[Answer]:
        """An answer for each conversation: one list of messages, or several. `parameters` are those of
        /v1/chat/completions, with `logprobs` as a number. Raises as `generate`."""
        self._must_generate()
        name = adapter or self._host.name
        requests = [chat_request(name, conversation, parameters) for conversation in conversations(messages)]
        return self._thread.run(self._answering.chats(requests))

    def stream(self, prompt: str | Sequence[int], *, adapter: str | None = None, **parameters: Any) -> AnswerStream:
        """The answer to one prompt as it comes. Raises as `generate`, before it returns where a server would refuse."""
        self._must_generate()
        [only] = self._one(prompt_list(prompt), "prompt")
        request = completion_request(adapter or self._host.name, only, parameters)
        generation = self._thread.run(self._answering.completion_generation(request))
        return AnswerStream(self, self._thread, generation)

    def stream_chat(self, messages: Messages, *, adapter: str | None = None, **parameters: Any) -> AnswerStream:
        """The answer to one conversation as it comes; `parts` of its deltas tell reasoning and tool calls from text.
        Raises as `stream`."""
        self._must_generate()
        [only] = self._one(conversations(messages), "conversation")
        request = chat_request(adapter or self._host.name, only, parameters)
        generation = self._thread.run(self._answering.chat_generation(request))
        return AnswerStream(self, self._thread, generation)

    def embed(self, texts: Prompts, **parameters: Any) -> npt.NDArray[np.float32]:
        """A row for each text, of an embedding model; `parameters` are those of /v1/embeddings. Raises as `generate`,
        and InvalidRequestError for a model that has no embeddings."""
        several = prompt_list(texts)
        if not several:
            raise InvalidRequestError("texts must not be empty.", param="texts")
        name = self._host.name
        groups = [several[begin : begin + _TEXTS_TOGETHER] for begin in range(0, len(several), _TEXTS_TOGETHER)]
        requests = [embedding_request(name, group, parameters) for group in groups]
        return np.concatenate(self._thread.run(self._answering.vectors(requests)))

    def reset_prefix_cache(self) -> None:
        """Forgets all computed prompts. Raises as `generate`."""
        self._must_generate()
        self._thread.run(self._host.engine.reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """Gives the memory back until `wake_up`: the engine's process ends. `level`, 1 or 2, is vLLM's, and makes no
        difference here. What runs ends with an error, and so does what comes meanwhile. Raises as `generate`."""
        self._must_generate()
        if level not in (1, 2):
            raise InvalidRequestError("level must be 1 or 2.", param="level")
        self._thread.run(self._host.generating.sleep.sleep(wait=False))

    def wake_up(self) -> None:
        """Loads the model again. Raises as the constructor."""
        self._must_generate()
        self._thread.run(self._host.generating.sleep.wake())

    @staticmethod
    def _one(items: list[Any], what: str) -> list[Any]:
        if len(items) != 1:
            raise InvalidRequestError(f"A stream takes one {what}, not {len(items)}.")
        return items

    def _must_generate(self) -> None:
        if self._host.makes_vectors:
            raise InvalidRequestError(f"The model {self._host.name} generates no text; use embed().")

    def close(self) -> None:
        """Ends what runs and gives back the memory. May be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
