"""Reading split text: tags, and what is recorded."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.tokenizers.parsing import Reader, Reading, Tags
from support.reading import T, read, split


@given(
    text=st.text("<ab>", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    tags=st.lists(st.text("<ab>", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
)
@example(text="<a<ab>", cuts=[1, 2, 3], tags=["<ab>"])
def test_the_first_tag_is_found_however_the_text_is_cut(text: str, cuts: list[int], tags: list[str]) -> None:
    if any(tag in other for tag in tags for other in tags if tag != other):
        with pytest.raises(ValueError, match="part of another"):
            Tags(*tags)
        return
    before: list[str] = []
    found, rest = read(lambda reader: reader.until(Tags(*tags), before.append), split(text, cuts))
    start, tag = min(((text.find(tag), tag) for tag in tags if tag in text), default=(len(text), None))
    assert ("".join(before), found) == (text[:start], tag)
    assert rest == text[start + len(tag or "") :]


@given(text=st.text("<ab>", min_size=1, max_size=20))
def test_no_more_is_held_back_than_what_may_become_a_tag(text: str) -> None:
    tags = Tags("<aab>", "b<")
    start = tags.begun(text, 0)
    possible = [n for n in range(len(text)) if any(tag != text[n:] and tag.startswith(text[n:]) for tag in tags.tags)]
    assert start == min(possible, default=len(text))


@given(text=st.text("<ab>", max_size=8))
def test_a_tag_is_read_only_where_it_stands(text: str) -> None:
    tag, rest = read(lambda reader: reader.one_of(Tags("<a>", "<ab>")), list(text))
    assert tag == next((tag for tag in ("<a>", "<ab>") if text.startswith(tag)), None)
    assert rest == text[len(tag or "") :]


def test_an_empty_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Tags("a", "")


def test_what_is_recorded_is_all_that_was_read() -> None:
    reader = Reader()
    reader.feed("a<b c")
    reader.record("x")
    assert read_all(reader.until(Tags("<b"), str)) == "<b"
    read_all(reader.skip_space())
    assert reader.recorded() == "xa<b "
    assert (reader.recorded(), reader.rest()) == ("", "c")


def read_all(reading: Reading[T]) -> T:
    try:
        next(reading)
    except StopIteration as stop:
        found: T = stop.value
        return found
    raise AssertionError("it waits for more")
