"""What texts of a call may cost before they are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.pooling import tokenizing
from penstock.gateway.apis.pooling.tokenizing import Cut, tokenize_pairs


class Template:
    joined = 0

    def join(self, parts: list[list[int]], most: int | None, *, cut_start: bool) -> Any:
        self.joined += 1
        return SimpleNamespace(ids=[each for part in parts for each in part], types=None)


def test_a_query_is_not_copied_for_more_pairs_than_a_call_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TOKENS_OF_A_CALL", 100)
    template = Template()
    tokenizer = SimpleNamespace(
        encode_many=lambda texts: [[1] * len(text) for text in texts], pair_template=template, vocab_size=2
    )
    model: Any = SimpleNamespace(
        tokenizer=tokenizer,
        recipe=SimpleNamespace(lower_case=False),
        source=SimpleNamespace(info=SimpleNamespace(vocab_size=2)),
    )
    cut = Cut(most=64, allowed=False)
    assert len(tokenize_pairs(model, ["q" * 30], ["d"] * 3, cut, "documents")) == 3
    with pytest.raises(InvalidRequestError, match="more than 100 tokens together"):
        tokenize_pairs(model, ["q" * 30], ["d"] * 2000, cut, "documents")
    assert template.joined == 3 + 4
