from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.tokenizers import StopStrings, TokenizerError


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the match that begins earliest, and of those the shortest, which is complete first."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[2])


def run(matcher: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            return out, matched
    return out + matcher.flush(), matcher.matched


letters = st.sampled_from("ab🧿")


@given(
    pieces=st.lists(st.text(letters, max_size=5), max_size=8),
    stops=st.lists(st.text(letters, min_size=1, max_size=5), max_size=4),
)
@example(pieces=["ab", "c"], stops=["abcd", "bc"])
@example(pieces=["ab", "cd"], stops=["abcd", "bc"])
@example(pieces=["abc", "abd"], stops=["abcabd", "cab", "b"])
def test_same_as_searching_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    assert run(StopStrings(stops), pieces) == oracle("".join(pieces), stops)


@given(
    texts=st.lists(st.text(letters, max_size=12), max_size=4),
    stops=st.lists(st.text(letters, min_size=1, max_size=5), max_size=8),
)
def test_a_shared_automaton_and_texts_in_a_row(texts: list[str], stops: list[str]) -> None:
    """The automaton grows with what one text leads to; the next must not notice."""
    shared = StopStrings(stops)
    for text in texts:
        assert run(shared.unused(), list(text)) == oracle(text, stops)
    matcher = shared.unused()
    for text in texts:
        found = run(matcher, list(text))
        assert found == oracle(text, stops)
        if found[1] is not None:
            break


@given(text=st.text(letters, max_size=20), stops=st.lists(st.text(letters, min_size=1, max_size=4), max_size=4))
def test_the_stop_string_can_be_kept(text: str, stops: list[str]) -> None:
    before, matched = oracle(text, stops)
    assert run(StopStrings(stops, include_stop=True), list(text)) == (before + (matched or ""), matched)


@given(text=st.text(letters, max_size=20), stops=st.lists(st.text(letters, min_size=1, max_size=4), max_size=4))
def test_holds_back_no_more_than_what_may_become_a_match(text: str, stops: list[str]) -> None:
    matcher, sent = StopStrings(stops), ""
    for n, char in enumerate(text, 1):
        out, matched = matcher.push(char)
        sent += out
        if matched is not None:
            return
        seen = text[:n]
        open_starts = (k for k in range(n + 1) if any(s.startswith(seen[k:]) or seen[k:].startswith(s) for s in stops))
        assert sent == seen[: next(open_starts, n)]


def test_held_text_goes_out_once_it_cannot_match() -> None:
    matcher = StopStrings(["<|im_end|>"])
    assert matcher.push("a <|im_") == ("a ", None)
    assert matcher.push("start|>") == ("<|im_start|>", None)
    assert matcher.push("x<") == ("x", None)
    assert matcher.flush() == "<"


def test_among_matches_that_begin_together_the_first_complete_wins() -> None:
    assert StopStrings(["###", "#"]).push("a###") == ("a", "#")


def test_an_earlier_beginning_beats_an_earlier_end() -> None:
    matcher = StopStrings(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.push("d!") == ("", "abcd")


def test_a_match_that_waits_for_a_longer_one_is_found_at_the_end() -> None:
    matcher = StopStrings(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.flush() == "a"
    assert matcher.matched == "bc"


def test_nothing_follows_a_match() -> None:
    matcher = StopStrings(["."])
    assert matcher.push("One. Two.") == ("One", ".")
    assert matcher.push(" Three.") == ("", ".")
    assert matcher.flush() == ""
    assert matcher.matched == "."


def test_without_stop_strings_text_passes() -> None:
    matcher = StopStrings([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_characters_with_a_meaning_in_patterns() -> None:
    assert StopStrings(["^x", "]", "\\"]).push("a-b^c\\") == ("a-b^c", "\\")


def test_many_stop_strings_cost_what_the_text_leads_to() -> None:
    """Memory, because it can be counted: all states of these would take megabytes."""
    stops = [f"<|end_{number}|>" for number in range(1000)] + ["a" * 4096 + "b"]
    tracemalloc.start()
    matcher = StopStrings(stops)
    assert run(matcher.unused(), ["many words <", "|end", "ing", "aaa"]) == ("many words <|endingaaa", None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
    assert run(matcher.unused(), ["x<|end_7", "77|>"]) == ("x", "<|end_777|>")
    assert run(matcher.unused(), ["a" * 5000, "b"]) == ("a" * 904, stops[-1])


def test_rare_characters() -> None:
    """Those beyond U+FFFF are looked for in another way."""
    assert StopStrings(["🧿x", "#"]).push("👋🧿y#") == ("👋🧿y", "#")
    assert StopStrings(["🧿x", "👋🏽", "\uffff"]).push("👋🧿x") == ("👋", "🧿x")
    assert StopStrings(["\uffff"]).push("👋\uffff") == ("👋", "\uffff")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(TokenizerError, match="empty"):
        StopStrings(["a", ""])
