"""From the body of a call of the OpenAI API to what the data plane is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.micro.benchmark import Benchmark, Work

if TYPE_CHECKING:
    from penstock.gateway.models.language.models import ServedModel

_SAMPLING = {"max_tokens": 256, "temperature": 0.7, "top_p": 0.95, "seed": 7, "stream": True, "stop": ["\n\n", "User:"]}


def _served() -> ServedModel:
    from penstock.engines.contract.model_info import ModelInfo
    from penstock.gateway.models.language.models import ServedModel
    from penstock.kvcache import KVGroup

    info = ModelInfo(
        vocab_size=32_000,
        max_model_len=8192,
        kv_groups=(KVGroup(16),),
        num_blocks=4096,
        eos_token_ids=(2,),
        runner="none",
    )
    return ServedModel("model", "model", 0, info, {"temperature": 0.8})


def _body(**fields: Any) -> bytes:
    import msgspec

    return msgspec.json.encode({"model": "model", **fields, **_SAMPLING})


def _chat() -> Work:
    """A conversation of 9 messages of 200 characters."""
    from penstock.gateway.apis.openai.messages import template_messages
    from penstock.gateway.apis.openai.schemas import CHAT, ChatRequest
    from penstock.gateway.apis.openai.validation import chat_generate_request
    from penstock.gateway.generating.request_reading import parse
    from penstock.gateway.requests.context import RequestContext
    from penstock.gateway.transports.http.settings import AppSettings

    turns = [{"role": role, "content": "word " * 40} for role in ("user", "assistant")] * 4
    body = _body(messages=[{"role": "system", "content": "word " * 40}, *turns])
    model, settings = _served(), AppSettings()

    def run() -> None:
        request = parse(body, ChatRequest, CHAT)
        template_messages(request.messages, RequestContext())
        chat_generate_request(request, model, settings, RequestContext())

    return Work(run)


def _completion() -> Work:
    """A prompt of 1000 token ids."""
    from penstock.gateway.apis.openai.schemas import COMPLETION, CompletionRequest
    from penstock.gateway.apis.openai.validation import completion_generate_request
    from penstock.gateway.generating.request_reading import parse
    from penstock.gateway.requests.context import RequestContext
    from penstock.gateway.transports.http.settings import AppSettings

    body = _body(prompt=[number * 31 % 32_000 for number in range(1000)])
    model, settings = _served(), AppSettings()

    def run() -> None:
        completion_generate_request(parse(body, CompletionRequest, COMPLETION), model, settings, RequestContext())

    return Work(run)


BENCHMARKS = (
    Benchmark("request/chat-9-messages", "request", _chat),
    Benchmark("request/completion-1000-ids", "request", _completion),
)
