"""Prompts that cannot fit are refused before all of them is encoded; long calls are encoded beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language import generate_request, prompts
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.intake import WorkPools
from support.dataplane import Setup, request

TOO_LONG = (
    "This model's maximum context length is 256 tokens. However, your prompt has more than 255 tokens. Please reduce "
    "the length of the prompt."
)


@pytest.fixture(params=[False, True], ids=["refused", "clamped"])
async def setup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Setup]:
    made = Setup(tmp_path, SchedulerConfig(), num_blocks=64, clamp_max_tokens=request.param)
    await made.engine.start()
    made.model.loaded = True
    yield made
    made.engine.core.check_integrity()
    await made.engine.stop()


@pytest.fixture
def encoded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each text that has been encoded, and whether that was on the event loop."""
    calls: list[tuple[str, bool]] = []
    encode = setup.tokenizer.encode

    def note(text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        calls.append((text, threading.current_thread() is threading.main_thread()))
        return encode(text, add_special_tokens, limit)

    monkeypatch.setattr(setup.tokenizer, "encode", note)
    return calls


@pytest.mark.parametrize("text", ["hello " * 50_000, "7" * 300_000])
async def test_a_long_prompt_is_refused_without_a_count(setup, text):
    with pytest.raises(ContextLengthError) as refused:
        await setup.plane.generate(request(prompts=["hi", text]))
    assert (refused.value.message, refused.value.param) == (TOO_LONG, "prompt")
    with pytest.raises(ContextLengthError) as refused:
        await setup.plane.chat_prompt("m", [{"role": "user", "content": text}], RequestContext())
    assert refused.value.message == TOO_LONG


async def test_a_prompt_that_was_counted_is_refused_with_its_count(setup):
    text = "hello " * 500
    count = len(setup.tokenizer.encode(text))
    with pytest.raises(ContextLengthError, match=rf"requested {count + 8} tokens \({count} in the prompt"):
        await setup.plane.generate(request(prompts=[text], max_tokens=8))


async def test_a_long_prompt_that_fits_is_served(setup, monkeypatch):
    text = "<|im_start|>" * 250
    monkeypatch.setattr(setup.tokenizer._bounded, "_whole", 100)
    async with await setup.plane.generate(request(prompts=[text], max_tokens=2)) as generation:
        assert generation.prompt_token_ids == [[setup.tokenizer.id_of("<|im_start|>")] * 250]


@pytest.mark.parametrize(("count", "inline"), [(1, True), (40, True), (41, False)])
async def test_the_texts_of_a_call_are_encoded_on_the_loop_while_they_are_short_together(setup, encoded, count, inline):
    texts = [f"{number:0100d}" for number in range(count)]
    async with await setup.plane.generate(request(prompts=texts, max_tokens=1)) as generation:
        assert [setup.tokenizer.decode(ids) for ids in generation.prompt_token_ids] == texts
    assert encoded == [(text, inline) for text in texts]


async def test_texts_and_token_ids_keep_their_order(setup):
    async with await setup.plane.generate(request(prompts=["a", [20, 21], "b"], max_tokens=1)) as generation:
        assert [setup.tokenizer.decode(ids) for ids in generation.prompt_token_ids[::2]] == ["a", "b"]
        assert generation.prompt_token_ids[1] == [20, 21]


@pytest.mark.parametrize("count", [8, 400])
async def test_the_texts_of_a_call_have_a_limit_together(setup, encoded, monkeypatch, count):
    monkeypatch.setattr(prompts, "TOKENS_OF_A_CALL", 1000)
    texts = ["7" * 200] * count
    with pytest.raises(InvalidRequestError, match="more than 1000 tokens together"):
        await setup.plane.generate(request(prompts=texts, max_tokens=1))
    assert len(encoded) <= 10
    with pytest.raises(InvalidRequestError, match="more than 1000 tokens together"):
        await setup.plane.generate(request(prompts=[*["7" * 200] * 4, "7" * 100_000], max_tokens=1))


@pytest.mark.parametrize(("n", "asked", "count"), [(2, 4, 100), (3, 4, 150), (2, 5, 120)])
async def test_the_choices_of_a_call_have_so_many_log_probabilities_of_prompts(setup, monkeypatch, n, asked, count):
    """Else a few kilobytes could ask for gigabytes."""
    monkeypatch.setattr(generate_request, "_MAX_PROMPT_LOGPROBS", 100)
    wanted = request(prompts=[[20] * 5, [21] * 5], n=n, params={"prompt_logprobs": asked})
    fits = (
        nullcontext() if count <= 100 else pytest.raises(InvalidRequestError, match=f"have {count} log probabilities")
    )
    with fits:
        await generate_request.prompt_tokens(setup.model, wanted, WorkPools().text)
