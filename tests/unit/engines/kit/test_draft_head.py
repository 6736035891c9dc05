"""A draft head: at every position it gets the next token and what the model gave of this one, of the request itself.

The features of the fake model are the token that it computed at a position, the position, and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.kit.batch import Outputs, StepBatch
from penstock.engines.kit.draft_model import DraftModel, HeadInputs
from penstock.engines.kit.features import FeatureStore, places_of
from penstock.engines.kit.step_runner import StepRunner
from support.engine import Driver
from unit.engines.kit.fake_model import VOCAB_SIZE, FakeModel
from unit.engines.kit.test_draft_model import GROUPS, texts_as_alone
from unit.engines.kit.test_step_runner import REQUESTS, alone

BLOCK_SIZE = GROUPS[0].block_size


class FeatureModel(FakeModel):
    """Gives features of every token that it computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.features = FeatureStore(len(self._tokens), BLOCK_SIZE, 3, np.float32)

    def wait(self, buffer: int) -> Outputs:
        batch, outputs = self._prepared[buffer], super().wait(buffer)
        features = np.stack([batch.token_ids, batch.positions, np.ones(len(batch.positions))], 1).astype(np.float32)
        self.features.put(places_of(batch, BLOCK_SIZE), features)
        return outputs

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(copies)
        for source, destination in copies:
            self.features.raw[destination] = self.features.raw[source]


class FakeHead(FakeModel):
    """Knows all tokens up to the newest from its cache and from the features of the first position. Its own hidden
    state of a position is the token that it got there, the position behind, and 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_tokens: list[int] = []
        self.contexts: list[list[int]] = []
        """All that it saw when it made a first guess."""

    def _compute(self, batch: StepBatch) -> Outputs:
        self.num_tokens.append(len(batch.positions))
        features, positions = batch.features, batch.positions
        assert features is not None
        assert batch.wants_hidden
        assert (features[:, 1] == positions).all(), "features of another position"
        behind = np.setdiff1d(np.arange(len(positions)), batch.begins)
        assert (features[behind, 0] == batch.token_ids[behind - 1]).all(), "features of another token"
        outputs = super()._compute(batch)
        for i, at in enumerate(batch.logits_at):
            if features[at, 2]:
                self.contexts.append(self._context(batch, i, int(positions[at])))
        hidden = np.stack([batch.token_ids, positions + 1, 0 * positions], 1)[batch.logits_at].astype(np.float32)
        return Outputs(outputs.logits[:, ::-1], hidden)


def make(
    num_blocks: int = 40, num_buffers: int = 2, max_tokens: int = 64, **options: Any
) -> tuple[StepRunner, FakeHead]:
    """Logits of the head are in reverse order."""
    model, head = FeatureModel(GROUPS, num_blocks, num_buffers, **options), FakeHead(GROUPS, num_blocks, 1)
    inputs = HeadInputs(model.features, np.arange(VOCAB_SIZE)[::-1])
    drafts = DraftModel(head, BLOCK_SIZE, num_blocks, 64, max_tokens, inputs, clock=lambda: 0.0)
    info = msgspec.structs.replace(model.info, has_draft_model=True)
    return StepRunner(model, info, max_num_seqs=8, model_dir=Path("unused"), draft_model=drafts), head


@settings(max_examples=30)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(18, 60),
    tokens=st.integers(8, 40),
    depth=st.integers(1, 3),
    lazy=st.booleans(),
    max_tokens=st.sampled_from([3, 64]),
)
def test_everyone_gets_what_it_gets_alone(
    requests: Any, num_blocks: int, tokens: int, depth: int, lazy: bool, max_tokens: int
) -> None:
    """Under preemption, prefix hits, forks and prompts in parts; and the head gets what belongs together."""
    runner, head = make(num_blocks, depth, max_tokens, lazy=lazy)
    driver = Driver(
        runner, max_num_seqs=8, speculative="draft_model", max_num_batched_tokens=tokens, steps_in_flight=depth
    )
    texts = texts_as_alone(driver, requests)
    for context in head.contexts:
        assert any(_is_of(context, text) for text in texts)


def _is_of(context: list[int], text: list[int]) -> bool:
    """Whether the head saw a request's tokens from the second on. At the end of a block, which requests may share, it
    may have seen another's."""
    pairs = zip(context, text[1:], strict=False)
    return len(context) < len(text) and all(
        seen == token or ((at + 1) % BLOCK_SIZE == 0 and at + 1 < len(context))
        for at, (seen, token) in enumerate(pairs)
    )


def test_right_guesses_save_steps() -> None:
    """The likeliest token is mostly the same for the head, which does not see the first one."""
    runner, _head = make()
    driver = Driver(runner, max_num_seqs=8, speculative="draft_model")
    prompts = [[n, 1, 2] for n in range(5)]
    for prompt in prompts:
        [request] = driver.add(prompt, 40)
        driver.run()
        assert driver.tokens[request] == alone(prompt, 40, 0, [0])[0]
    assert driver.stats.accepted_tokens > 20
    assert driver.stats.steps < 180


def test_a_prefix_hit_is_one_for_the_head_too() -> None:
    runner, head = make()
    driver = Driver(runner, max_num_seqs=8, speculative="draft_model")
    prompt = [0, 1, 3, 2, 5, 4, 1, 1, 0, 2, 4, 3, 3]
    driver.add(prompt, 6)
    driver.run()
    assert head.num_tokens[0] == len(prompt) + 1, "it catches up at the first guess"
    head.num_tokens.clear()
    driver.add(prompt, 6)
    driver.run()
    assert head.num_tokens[0] <= 3


def test_there_is_no_guess_behind_a_prompt_that_is_under_way() -> None:
    """Its last token alone is computed in a step of its own, while the others are."""
    runner, head = make()
    driver = Driver(runner, max_num_seqs=8, speculative="draft_model", max_num_batched_tokens=10, steps_in_flight=2)
    [request] = driver.add([0] * 11, 8)
    driver.run()
    assert driver.tokens[request] == alone([0] * 11, 8, 0, [0])[0]
    assert head.num_tokens[0] == 11


def test_a_request_of_one_token_gets_no_guess_before_its_second() -> None:
    runner, head = make()
    driver = Driver(runner, max_num_seqs=8, speculative="draft_model")
    [request] = driver.add([3], 12)
    driver.run()
    assert driver.tokens[request] == alone([3], 12, 0, [0])[0]
    assert head.num_tokens[0] == 2
