"""Whose counts a report rests on, and what prompts came to."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import options
from penstock.loadtest.report.model import ServerWatch
from penstock.loadtest.tokens import cached_own, token_counts


def sample(counted: int | None = 130, asked: int | None = 100, wanted: int | None = None, **fields: Any) -> Sample:
    plain: dict[str, Any] = {"index": 0, "intended": 0.0, "sent": 0.0, "ended": 1.0, "arrivals": [0.5, 0.6]}
    counts = {"prompt_tokens": counted, "asked_prompt_tokens": asked, "wanted_prompt_tokens": wanted}
    return Sample(**(plain | counts | {"output_tokens": 2} | fields))


def told(samples: list[Sample], server: ServerWatch | None = None, **settings: Any) -> dict[str, Any]:
    return token_counts(samples, options({"url": "http://x"} | settings), server)


def test_prompts_that_came_out_longer_are_told_with_the_reason() -> None:
    found = told([sample(130), sample(140), sample(9, error="http_500")])
    assert (found["prompt_from"], found["output_from"]) == ("the server", "the server")
    assert (found["prompt_asked"], found["prompt_counted"]) == (100, 135)
    assert found["note"].startswith("prompts had 135 tokens on average as the server counts, 100 were asked for")
    assert "without --tokenizer" in found["note"]
    assert "template" in found["note"]
    plain = told([sample(130)], protocol="openai-completions")["note"]
    assert "without --tokenizer" in plain
    assert "template" not in plain
    assert "without --tokenizer" not in told([sample(130)], tokenizer="folder")["note"]


def test_small_differences_and_prompts_that_nobody_asked_for_are_no_news() -> None:
    assert "note" not in told([sample(104)])
    found = told([sample(130, asked=None)])
    assert "note" not in found
    assert "prompt_asked" not in found


def test_who_counted() -> None:
    assert told([sample(None, output_tokens=None)])["output_from"] == "pieces of the streams"
    assert told([sample(), sample(output_tokens=None)])["output_from"].startswith("the server in 1 of 2 answers")
    assert told([sample(None, wanted=100)])["prompt_from"] == "the tokenizer"
    nobody = told([sample(None)])
    assert nobody["prompt_from"] == "nobody"
    assert "the total has output tokens only" in nobody["note"]


def test_tensors_have_no_tokens() -> None:
    assert told([sample(None, None, arrivals=[], output_tokens=None)], protocol="kserve-http") == {}
    assert told([]) == {}


@pytest.mark.parametrize("maker", ["penstock_prefix_cache_{}_total", "vllm:prefix_cache_{}_total"])
def test_prompts_from_the_servers_cache(maker: str) -> None:
    server = ServerWatch(counters={maker.format("queries"): 1000.0, maker.format("hits"): 900.0})
    plain = options({"url": "http://x"})
    found = told([sample(125)], server)
    assert found["prompt_cached"] == 0.9
    assert cached_own(found, plain) == pytest.approx(0.7), "a fifth may be the template's"
    assert cached_own(told([sample(100)], server), plain) == pytest.approx(0.9)
    assert cached_own(told([sample(100)], ServerWatch(counters={maker.format("queries"): 10.0})), plain) == 0
    assert cached_own(told([sample(1000)], server), plain) == 0
    assert cached_own(told([sample(100)]), plain) == 0


@pytest.mark.parametrize(
    "settings", [{"turns": 2}, {"shared_prefix_tokens": 9}, {"trace": "t"}, {"dataset": "d"}, {"mix": ["1 a turns=2"]}]
)
def test_prompts_that_are_meant_to_be_known(settings: dict[str, Any]) -> None:
    assert cached_own({"prompt_cached": 1.0}, options({"url": "http://x"} | settings)) == 0
