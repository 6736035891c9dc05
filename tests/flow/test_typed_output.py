"""Parts of an answer, from the engine's tokens to the data plane's deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.dataplane import ChoiceDelta
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart
from support.dataplane import Setup, request
from support.stages import STAGES, joined

ANSWER = '<think>Let me look.</think>One moment.<tool>look:{"at": 1}</tool><tool>see:{}</tool>'
PARTS = [
    ReasoningPart("Let me look."),
    TextPart("One moment."),
    ToolCallPart(0, '{"at": 1}', "look"),
    ToolCallPart(1, "{}", "see"),
]


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = Setup(tmp_path, SchedulerConfig(), 64, answer=ANSWER)
    await made.engine.start()
    made.model.loaded = True
    yield made
    made.engine.core.check_integrity()
    await made.engine.stop()


def parts_of(deltas: list[ChoiceDelta], index: int = 0) -> list[Part]:
    return joined(part for delta in deltas if delta.index == index for part in delta.parts or ())


async def test_stages_find_the_parts_of_every_choice(setup):
    deltas = await setup.generate(max_tokens=0, n=2, prompts=["one", "two"], stages=STAGES)
    assert [parts_of(deltas, index) for index in range(4)] == [PARTS] * 4
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"] * 4


async def test_nothing_is_shown_of_a_tag_and_no_token_is_lost_behind_it(setup):
    deltas = await setup.generate(max_tokens=0, stages=STAGES, params={"logprobs": None})
    assert all(delta.parts or delta.finish_reason for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert setup.tokenizer.decode(tokens, skip_special_tokens=True) == ANSWER


async def test_parts_and_usage_do_not_depend_on_how_tokens_were_merged(setup):
    found = []
    for slow in (False, True):
        generation = await setup.plane.generate(request(max_tokens=0, stages=STAGES))
        while slow and setup.engine.core.has_work:  # nobody reads: everything merges into one delta
            await asyncio.sleep(0)
        deltas = [delta async for each in generation for delta in each]
        found.append((parts_of(deltas), generation.usage.completion_tokens))
    assert found[0] == found[1]


async def test_a_stop_string_in_the_text_ends_the_parts_and_the_engine_s_work(setup):
    wanted = request(max_tokens=0, n=2, stages=STAGES, stop=("look", "mom", "</think>"))
    generation = await setup.plane.generate(wanted)
    deltas = [delta async for each in generation for delta in each]
    for index in range(2):
        assert parts_of(deltas, index) == [PARTS[0], TextPart("One ")]
    ends = [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason]
    assert ends == [("stop", "mom")] * 2
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert generation.usage.completion_tokens == len(tokens)
    await setup.generate(max_tokens=1)
    assert setup.engine.stats.finished["length"] == 1
    assert "stop" not in setup.engine.stats.finished


async def test_stop_strings_in_thoughts_markup_and_calls_are_not_looked_for(setup):
    stop = ("look", "</think>", "<tool>", '": 1', "}", "see", ".<tool>", "moment.see")
    generation = await setup.plane.generate(request(max_tokens=0, stages=STAGES, stop=stop))
    deltas = [delta async for each in generation for delta in each]
    assert parts_of(deltas) == PARTS
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert setup.engine.stats.finished == {"stop": 1}


async def test_without_stages_all_that_the_model_wrote_is_searched(setup):
    deltas = await setup.generate(max_tokens=0, stop=('": 1',))
    assert "".join(delta.text for delta in deltas) == ANSWER[: ANSWER.index('": 1')]
    assert deltas[-1].stop_reason == '": 1'


async def test_each_token_has_its_logprob_whatever_part_it_is_in(setup):
    deltas = await setup.generate(max_tokens=0, stages=STAGES, params={"logprobs": 1})
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert [entry.token_id for delta in deltas for entry in delta.logprobs or ()] == tokens
    assert parts_of(deltas) == PARTS


async def test_a_failing_stage_ends_the_call_and_frees_its_blocks(setup):
    class Broken(STAGES[0]):  # type: ignore[misc, valid-type]
        def push(self, text: str) -> list[Part]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await setup.generate(max_tokens=0, stages=(Broken,))
    await setup.generate(max_tokens=1)
    assert setup.engine.stats.num_running == 0
