"""From a request to what the model reads and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.conversation import continues, template_messages
from penstock.gateway.anthropic.retention import cache_retention
from penstock.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest, OutputConfig
from penstock.gateway.anthropic.thinking import template_kwargs
from penstock.gateway.anthropic.tools import offered_tools
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.answer_shape import AnswerShape, answer_shape
from penstock.gateway.generating.fair_tenant import fair_tenant
from penstock.gateway.generating.thought_budget import AskedBudget
from penstock.gateway.llm.dataplane import ChatPrompt, DataPlane, GenerateRequest, ServedModel
from penstock.gateway.llm.sampling import SamplingFields, bounded, sampling_params, stop_strings
from penstock.gateway.llm.structured_output import json_schema

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given."""

    model: str
    messages: list[dict[str, Any]]
    continues: bool
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]

    async def prompt(self, dataplane: DataPlane, context: RequestContext) -> ChatPrompt:
        """Raises as `DataPlane.chat_prompt`."""
        return await dataplane.chat_prompt(
            self.model,
            self.messages,
            context,
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
        )


def read_chat(
    request: CountTokensRequest, model: ServedModel, budget: AskedBudget | None = None
) -> tuple[Chat, AnswerShape]:
    """What the model is shown, and what it may answer. Raises InvalidRequestError, UnsupportedError."""
    if not model.has_chat_template:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="model")
    messages = template_messages(request.system, request.messages)
    tools = offered_tools(request.tools, request.tool_choice)
    show_reasoning = request.thinking is None or request.thinking.display != "omitted"
    asked = _answer_format(request.output_config)
    shape = answer_shape(model, tools.use, asked, show_reasoning=show_reasoning, budget=budget)
    kwargs = template_kwargs(request.thinking, request.output_config, model.parsers)
    return Chat(request.model, messages, continues(messages), tools.shown, kwargs), shape


def _answer_format(output: OutputConfig | None) -> Grammar | None:
    if output is None or output.format is None:
        return None
    return json_schema(output.format.schema, "output_config.format.schema")


def generate_request(
    request: MessagesRequest, model: ServedModel, policy: str, context: RequestContext
) -> GenerateRequest:
    """What is asked for, still without its prompt, of a request that `read_chat` has checked. Raises
    InvalidRequestError, UnsupportedError."""
    max_tokens = bounded(request.max_tokens, "max_tokens", 1, _MAX_TOKENS)
    fields = SamplingFields(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
    user = request.metadata.user_id if request.metadata is not None else None
    return GenerateRequest(
        model=request.model,
        prompts=[[]],
        params=sampling_params(fields, model.info, model.default_params, max_tokens=max_tokens, logprobs=None),
        grammar_field=None if request.output_config is None else "output_config.format.schema",
        stop=stop_strings(request.stop_sequences, "stop_sequences"),
        add_special_tokens=False,
        context=context,
        tenant=fair_tenant(context, user, policy),
        cache_retention=cache_retention(request),
    )
