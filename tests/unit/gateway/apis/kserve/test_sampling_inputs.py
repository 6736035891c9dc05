"""Sampling parameters of KServe requests that are lists: as JSON of their own, or as a text that holds it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.kserve.tensor_form import sampling_fields
from penstock.gateway.models.language.sampling import SamplingFields


@pytest.mark.parametrize(
    ("name", "text", "value"), [("bad_words", '["a b"]', ["a b"]), ("allowed_token_ids", "[3, 5]", [3, 5])]
)
def test_lists_may_be_json_texts_and_others_are_refused_by_name(name: str, text: str, value: Any) -> None:
    for given in (text, value):
        assert getattr(sampling_fields({name: given}, SamplingFields), name) == value
    for wrong in ("a b", "{", 5, "[" * 5000 + "]" * 5000):
        with pytest.raises(InvalidRequestError) as refused:
            sampling_fields({name: wrong}, SamplingFields)
        assert refused.value.param == name
