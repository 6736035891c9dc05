"""From a GenerateRequest to text, in one process: the data plane over an inline engine with the simulated runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, ProcessorCall, RequestOutput
from penstock.engines.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    NumericalError,
    QueueFullError,
    UnsupportedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.dataplane import ChoiceDelta, Generation
from penstock.gateway.models.language.sampling import word_tokens
from penstock.gateway.requests.context import RequestContext
from support.dataplane import MARKER, Setup, request
from support.inline_engine import InlineEngine
from support.tokenizers import byte_level


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[Setup] = []

    async def make(num_blocks: int = 64, *, clamp_max_tokens: bool = False, **scheduler: Any) -> Setup:
        made.append(Setup(tmp_path, SchedulerConfig(**scheduler), num_blocks, clamp_max_tokens=clamp_max_tokens))
        await made[-1].engine.start()
        made[-1].model.loaded = True
        return made[-1]

    yield make
    for each in made:
        each.engine.core.check_integrity()
        await each.engine.stop()


def text_of(deltas: list[ChoiceDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens_of(deltas: list[ChoiceDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def test_text_is_what_the_tokens_decode_to(setup):
    s = await setup()
    deltas = await s.generate(max_tokens=40)
    assert len(tokens_of(deltas)) == 40
    assert text_of(deltas) == s.tokenizer.decode(tokens_of(deltas))
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]


async def test_choices_are_numbered_prompt_by_prompt(setup):
    s = await setup()
    deltas = await s.generate(prompts=["one", "two"], n=3)
    assert sorted({delta.index for delta in deltas}) == [0, 1, 2, 3, 4, 5]
    assert text_of(deltas, 0) == text_of(deltas, 2) != text_of(deltas, 3)


async def test_choices_that_are_the_same_are_computed_once(setup):
    s = await setup()
    stop = text_of(await s.generate(max_tokens=60))[20:23]
    [alone, other] = [await s.generate(max_tokens=60, stop=(stop,), prompts=[text]) for text in ("a question", "other")]
    before = s.engine.stats.admitted
    wanted = request(max_tokens=60, stop=(stop,), n=3, prompts=["a question", "other"], params={"seed": 4})
    generation = await s.plane.generate(wanted)
    batches = [batch async for batch in generation]
    deltas = [delta for batch in batches for delta in batch]
    assert all(len({delta.index for delta in batch}) == len(batch) for batch in batches)
    for index, same in enumerate([alone] * 3 + [other] * 3):
        own = [delta for delta in deltas if delta.index == index]
        assert (text_of(own, index), tokens_of(own, index)) == (text_of(same), tokens_of(same))
        assert [d.finish_reason for d in own if d.finish_reason] == [d.finish_reason for d in same if d.finish_reason]
    counts = [len(tokens_of(alone))] * 3 + [len(tokens_of(other))] * 3
    assert [generation.tokens_of(choice) for choice in range(len(counts))] == counts
    assert generation.usage.completion_tokens == sum(counts)
    assert s.engine.stats.admitted == before + 2
    deltas[0].token_ids.append(-1)
    assert all(-1 not in delta.token_ids for delta in deltas[1:]), "readers may change theirs"


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 1.0, "seed": 1}, {"processors": (ProcessorCall("p", {}),)}]
)
async def test_choices_that_may_differ_are_computed_each(setup, params):
    s = await setup()
    s.engine.core.scheduler.intake.info = msgspec.structs.replace(s.engine.info, supports_processors=True)
    await s.generate(n=3, params=params)
    assert s.engine.stats.admitted == 3


async def test_a_stop_string_is_never_shown_and_ends_the_engine_s_work(setup):
    s = await setup()
    whole = text_of(await s.generate(max_tokens=60))
    stop = whole[20:23]
    generation = await s.plane.generate(request(max_tokens=60, stop=(stop,)))
    deltas = [delta async for each in generation for delta in each]
    assert text_of(deltas) == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert generation.usage.completion_tokens == len(tokens_of(deltas)) < 60
    await s.generate(max_tokens=1)
    assert s.engine.stats.num_running == 0


async def test_usage_does_not_depend_on_how_tokens_were_merged(setup):
    s = await setup()
    stop = text_of(await s.generate(max_tokens=60))[20:23]
    usages = []
    for slow in (False, True):
        generation = await s.plane.generate(request(max_tokens=60, stop=(stop,)))
        while slow and s.engine.core.has_work:  # nobody reads: everything merges into one delta
            await asyncio.sleep(0)
        deltas = [delta async for each in generation for delta in each]
        usages.append((generation.usage.completion_tokens, text_of(deltas)))
    assert usages[0] == usages[1]


async def test_the_stop_string_can_be_included(setup):
    s = await setup()
    stop = text_of(await s.generate(max_tokens=60))[20:23]
    deltas = await s.generate(max_tokens=60, stop=(stop,), include_stop_str_in_output=True)
    assert text_of(deltas).endswith(stop)


async def test_stop_strings_count_only_after_min_tokens(setup):
    s = await setup()
    plain = await s.generate(max_tokens=60)
    stop = plain[20].text
    assert stop in text_of(plain)
    ended = tokens_of(await s.generate(max_tokens=60, stop=(stop,), params={"min_tokens": 0}))
    later = await s.generate(max_tokens=60, stop=(stop,), params={"min_tokens": len(ended)})
    assert len(tokens_of(later)) > len(ended)
    assert tokens_of(later)[: len(ended)] == ended
    assert stop in text_of(later)


async def test_a_stop_token_ends_the_text_before_itself(setup):
    s = await setup()
    tokens = tokens_of(await s.generate(max_tokens=20))
    stop = tokens[9]
    deltas = await s.generate(max_tokens=20, params={"stop_token_ids": (stop,)})
    expected = tokens[: tokens.index(stop)]
    assert tokens_of(deltas) == [*expected, stop]
    assert text_of(deltas) == s.tokenizer.decode(expected)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


async def test_max_tokens_0_means_what_the_context_leaves(setup):
    s = await setup()
    deltas = await s.generate(max_tokens=0, prompts=[[20] * 250])
    assert len(tokens_of(deltas)) == 6


async def test_a_cache_smaller_than_the_context_shortens_it(setup):
    s = await setup(num_blocks=8)
    deltas = await s.generate(max_tokens=0, prompts=[[20] * 10])
    assert len(tokens_of(deltas)) == 8 * 4 - 10
    with pytest.raises(ContextLengthError, match="is 32 tokens"):
        await s.generate(max_tokens=23, prompts=[[20] * 10])


async def test_a_refusal_says_how_many_tokens_would_fit(setup):
    s = await setup()
    with pytest.raises(ContextLengthError, match=r"At most 6 fit behind this prompt\.$"):
        await s.generate(max_tokens=7, prompts=[[20] * 250])
    with pytest.raises(ContextLengthError, match=r"the completion\.$"):
        await s.generate(max_tokens=7, prompts=[[20] * 256])


async def test_tokens_beyond_the_context_are_clamped_where_that_is_wanted(setup):
    s = await setup(clamp_max_tokens=True)
    for asked in (0, 5, 6, 7, 2**31 - 1):
        deltas = await s.generate(max_tokens=asked, prompts=[[20] * 250])
        assert len(tokens_of(deltas)) == min(asked or 6, 6)
    assert len(tokens_of(await s.generate(prompts=[[20] * 250], params={"max_tokens": 9, "min_tokens": 6}))) == 6
    for refused in (
        {"max_tokens": 1, "prompts": [[20] * 256]},
        {"params": {"max_tokens": 9, "min_tokens": 7}, "prompts": [[20] * 250]},
        {"max_tokens": 7, "prompts": [[20] * 250], "clamps": False},
    ):
        with pytest.raises(ContextLengthError):
            await s.generate(**refused)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "absent"}, ModelNotFoundError),
        ({"prompts": [[]]}, InvalidRequestError),
        ({"prompts": [[-1]]}, InvalidRequestError),
        ({"prompts": [[10**9]]}, InvalidRequestError),
        ({"prompts": ["\ud800"]}, InvalidRequestError),
        ({"prompts": [[20] * 256]}, ContextLengthError),
        ({"prompts": [[20] * 250], "max_tokens": 7}, ContextLengthError),
        ({"params": {"logprobs": 1}}, UnsupportedError),
        ({"prompts": [[20, MARKER]]}, NumericalError),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_answered(setup, fields, error):
    s = await setup()
    with pytest.raises(error):
        await s.plane.generate(request(**fields))
    await s.generate()


async def test_a_full_queue_says_when_to_come_back(setup):
    s = await setup(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=0)
    async with await s.plane.generate(request(max_tokens=100)):
        with pytest.raises(QueueFullError) as refused:
            await s.plane.generate(request())
    assert refused.value.retry_after >= 1


async def test_a_deadline_ends_a_request(setup):
    s = await setup()
    with pytest.raises(DeadlineExceededError):
        await s.generate(max_tokens=200, context=RequestContext(deadline=1e-9))


async def test_closing_early_aborts(setup):
    s = await setup()
    async with await s.plane.generate(request(max_tokens=200, n=2)):
        pass
    await s.generate(max_tokens=1)
    async with await s.plane.generate(request(max_tokens=200, n=2, params={"temperature": 1.0})):
        pass
    await s.generate(max_tokens=1)
    assert s.engine.stats.finished == {"abort": 1 + 2, "length": 2}


async def test_tenants_and_salts_divide_the_prefix_cache(setup):
    s = await setup()

    async def cached(**fields: Any) -> int:
        generation = await s.plane.generate(request(max_tokens=1, prompts=[list(range(20, 60))], **fields))
        [_ async for _ in generation]
        return generation.usage.cached_tokens

    assert await cached() == 0
    assert await cached() == 39
    assert await cached(tenant="a") == 0
    assert await cached(tenant="a") == 39
    assert await cached(tenant="a", cache_salt="x") == 0
    assert await cached(tenant="ax") == 0


async def test_tokens_that_only_the_tokenizer_has_do_not_reach_the_engine(tmp_path, monkeypatch):
    vocab_size = byte_level().token_to_id("caf\u00e9")
    s = Setup(tmp_path, SchedulerConfig(), 64, vocab_size=vocab_size)
    s.model.loaded = True
    sent: list[AddRequest] = []
    monkeypatch.setattr(s.engine, "submit", lambda adds: sent.extend(adds) or InlineEngine.submit(s.engine, adds))
    await s.engine.start()
    try:
        await s.generate(bad_words=("one", "caf\u00e9"), prediction="a caf\u00e9 question")
    finally:
        await s.engine.stop()
    [params] = [each.params for each in sent]
    assert params.bad_words == word_tokens(["one"], s.tokenizer)
    assert params.prediction == (*s.tokenizer.encode("a ", False), *s.tokenizer.encode(" question", False))


async def test_chat_prompts_are_rendered_and_encoded(setup):
    s = await setup()
    prompt = await s.plane.chat_prompt(
        "m", [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], RequestContext()
    )
    assert s.tokenizer.decode(prompt.token_ids) == prompt.end == "user: hi\n"


async def test_a_model_without_template_refuses_chats(setup):
    s = await setup()
    s.model.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await s.plane.chat_prompt("m", [{"role": "user", "content": "hi"}], RequestContext())


async def test_while_loading_nothing_is_served(setup):
    s = await setup()
    s.model.loaded = False
    assert s.plane.models.served() == []
    with pytest.raises(NotReadyError):
        s.plane.model("m")


async def test_every_name_is_listed(setup):
    s = await setup()
    assert [model.name for model in s.plane.models.served()] == ["m", "alias"]
    assert s.plane.models.ready
    assert s.plane.models.live


async def test_a_pulse_comes_when_the_engine_has_taken_the_request_in(setup):
    s = await setup()
    stream = RequestStream([1], lambda ids: None)
    checks: list[None] = []

    def admitted() -> bool:
        checks.append(None)
        return len(checks) >= 3

    wanted = request(pulse=0.01)
    ids, prompts = [(1,)], [[20]]
    async with Generation(
        stream, s.tokenizer, wanted, prompts, ids, s.metrics, list, lambda: None, admitted
    ) as generation:
        await generation.begin()
        assert len(checks) == 3
        assert [await anext(generation), await anext(generation)] == [[], []]
        stream.put(RequestOutput(1, [20]))
        assert len(await anext(generation)) == 1
        assert await anext(generation) == []
        stream.put(RequestOutput(1, [20], FinishReason.LENGTH))
        assert [each async for each in generation][-1][0].finish_reason == "length"
    assert generation._timer is not None
    assert generation._timer.cancelled()


async def test_without_a_pulse_there_is_no_timer(setup):
    s = await setup()
    async with await s.plane.generate(request()) as generation:
        assert generation._timer is None


async def test_what_the_engine_refuses_is_refused_before_any_pulse(setup, monkeypatch):
    s = await setup(max_num_seqs=1, max_queued_requests=0)
    step, turns = s.engine._step, iter(range(50))
    async with await s.plane.generate(request(max_tokens=0)):
        monkeypatch.setattr(s.engine, "_step", lambda: step() if next(turns, None) is None else None)
        with pytest.raises(QueueFullError):
            await s.plane.generate(request(pulse=1e-6))
    assert next(turns, None) is None


async def test_a_request_that_wakes_its_model_fits_the_cache_that_this_has_then(setup, monkeypatch):
    s = await setup()

    async def start_with_less() -> None:
        scheduler = s.engine.core.scheduler
        scheduler.info = scheduler.intake.info = msgspec.structs.replace(scheduler.info, num_blocks=8)

    monkeypatch.setattr(s.engine, "start", start_with_less)
    s.model.sleep.asleep = True
    deltas = await s.generate(max_tokens=0)
    assert 0 < len(tokens_of(deltas)) < 8 * 4
