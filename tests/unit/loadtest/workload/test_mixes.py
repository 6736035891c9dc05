"""Mixes of requests of several kinds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from penstock.loadtest.errors import LoadTestError
from support.workload import calls, write


def test_parts_are_drawn_by_weight_and_named() -> None:
    sent = calls(requests=4000, mix=["3 short prompt_tokens=4 output-tokens=2", "1 long"], prompt_tokens=40)
    kinds = Counter((call.tag, len(str(call.prompt).split()), call.output_tokens) for call in sent)
    assert set(kinds) == {("short", 4, 2), ("long", 40, 128)}, "a part has the workload's settings but for its own"
    assert kinds["short", 4, 2] == pytest.approx(3000, rel=0.03)


def test_parts_have_prefixes_of_their_own() -> None:
    sent = calls(requests=100, mix=["1 a", "1 b"], shared_prefix_tokens=20, prompt_tokens=5)
    begins = {(call.tag, tuple(str(call.prompt).split()[:20])) for call in sent}
    assert len(begins) == len({words for _, words in begins}) == 2


def test_a_mix_ends_with_the_first_of_its_files(tmp_path: Path) -> None:
    path = write(tmp_path, "some.jsonl", '{"prompt": "x"}', '{"prompt": "y"}')
    sent = calls(mix=[f"1 file dataset={path}", "1 made"], prompt_tokens=7)
    files = [call.prompt for call in sent if call.tag == "file"]
    assert sorted(map(str, files)) == ["x", "y"]
    assert all(len(str(call.prompt).split()) == 7 for call in sent if call.tag == "made")


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        (["3"], "'3' is not 'WEIGHT NAME key=value ...'"),
        (["much a"], "is not 'WEIGHT NAME"),
        (["0 a"], "with a weight above 0"),
        (["nan a"], "with a weight above 0"),
        (["1 turns=3"], "is not 'WEIGHT NAME"),
        (["1 a 'turns=3"], "is not 'WEIGHT NAME"),
        (["1 a seed=3"], "mix: a: 'seed=3' is none of prompt_tokens, .* with a value"),
        (["1 a turns"], "mix: a: 'turns' is none of"),
        (["1 a prompt_tokens=many"], r"mix: a: Expected `int`.*prompt_tokens"),
        (["1 a prompt_tokens=0"], r"mix: a: Expected `int` >= 1.*prompt_tokens"),
        (["1 a", "2 b", "1 b"], "two parts are called b"),
        (["1 a", "1 b turns=2"], "turns: a session needs a protocol for chats, not openai-completions"),
    ],
)
def test_bad_mixes(mix: list[str], problem: str) -> None:
    with pytest.raises(LoadTestError, match=problem):
        calls(mix=mix)
