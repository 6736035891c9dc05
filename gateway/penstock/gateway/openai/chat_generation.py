"""What a chat asks the engine for."""

from __future__ import annotations

from typing import Any

from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.answer_shape import answer_shape
from penstock.gateway.generating.thought_budget import asked_budget
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, GenerateRequest, ServedModel
from penstock.gateway.openai.messages import generation_prompt, template_documents, template_kwargs
from penstock.gateway.openai.schemas import ChatRequest
from penstock.gateway.openai.tools import tool_use
from penstock.gateway.openai.validation import chat_generate_request

_NO_REASONING = "this model's chat template shows no reasoning (--reasoning-parser)."


async def chat_generation(
    dataplane: DataPlane,
    settings: AppSettings,
    request: ChatRequest,
    messages: list[dict[str, Any]],
    context: RequestContext,
) -> GenerateRequest:
    """`messages` are as chat templates know them; those of `request` are not read. Raises PenstockError."""
    model = dataplane.model(request.model, context)
    opens, continues = generation_prompt(request)
    use = tool_use(request, context)
    thinks_never = _thinks_never(request, model, context)
    kwargs = template_kwargs(request, model.template_variables, context)
    documents = template_documents(request, model.template_variables)
    wanted = chat_generate_request(request, model, settings, context)
    budget = (
        None
        if thinks_never
        else asked_budget(
            ("thinking_token_budget", request.thinking_token_budget),
            ("max_reasoning_tokens", request.max_reasoning_tokens),
            max_tokens=wanted.params.max_tokens,
        )
    )
    show_reasoning = request.include_reasoning is not False
    shape = answer_shape(model, use, wanted.params.grammar, show_reasoning=show_reasoning, budget=budget)
    prompt = await dataplane.chat_prompt(
        request.model,
        messages,
        context,
        add_generation_prompt=opens,
        continue_final_message=continues,
        tools=use.shown if use.tools else None,
        documents=documents,
        template_kwargs=kwargs,
        cut=wanted.truncation is not None,
    )
    return shape.applied(wanted, prompt)


def _thinks_never(request: ChatRequest, model: ServedModel, context: RequestContext) -> bool:
    """Then what a request says about thinking is ignored: a bound of it is kept anyway."""
    if model.parsers.reasoning is not None:
        return False
    for name in ("thinking_token_budget", "max_reasoning_tokens"):
        if getattr(request, name) is not None:
            context.ignore(name, _NO_REASONING)
    if request.reasoning_effort not in (None, "none"):
        context.ignore("reasoning_effort", _NO_REASONING)
    return True
