"""The model that is checked, in an engine process of its own, with all that the checks look at."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import PenstockError
from penstock.gateway.commands.offline.llm import LLM, OPTIONS, Messages
from penstock.gateway.commands.offline.outputs import Answer
from penstock.gateway.configuration.config import Config, changes
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.language.prompts import ChatText, ChatValues, chat_text

_AT_ONCE = 16
"""Chats that are under way together."""


def options_of(config: Config) -> dict[str, Any]:
    """The options of an `LLM` that are not the defaults in a configuration."""
    return {name: value for name, value in changes(config).items() if name in OPTIONS}


class Subject(LLM):
    """An `LLM` that shows its parts."""

    def __init__(self, config: Config) -> None:
        """Raises as `LLM`."""
        # Limits here are upper bounds: a small context gives shorter answers, and not errors.
        super().__init__(config.models.model.model, **options_of(config) | {"clamp_max_tokens": True})
        self._must_generate()

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def model(self) -> LoadedModel:
        return self._host.generating

    @property
    def info(self) -> ModelInfo:
        return self.model.engine.info

    def render(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, *, opens: bool = False
    ) -> ChatText:
        """As a server renders a chat; `opens`: an answer is to follow. Raises ChatTemplateError."""
        template = self.model.chat_template
        assert template is not None
        values = ChatValues(messages, tools, None, None, opens, False)
        return chat_text(self.model, template, values)

    def ask(self, requests: Sequence[tuple[Messages, dict[str, Any]]], limit: int) -> list[Answer | PenstockError]:
        """Greedy answers to chats with their parameters, of at most `limit` tokens each."""

        def one(request: tuple[Messages, dict[str, Any]]) -> Answer | PenstockError:
            messages, parameters = request
            try:
                return self.chat(messages, max_tokens=limit, temperature=0.0, **parameters)[0]
            except PenstockError as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(one, requests))

    def losses(self, token_ids: Sequence[int]) -> list[float]:
        """Negative logarithms of the probabilities of all tokens but the first. Raises PenstockError."""
        [answer] = self.generate(list(token_ids), max_tokens=1, temperature=0.0, prompt_logprobs=0)
        return [-entry.logprob for entry in answer.prompt_logprobs or () if entry is not None]
