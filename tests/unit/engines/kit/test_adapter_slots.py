"""The slots of LoRA adapters that all engines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured


def test_a_slot_is_taken_until_its_adapter_leaves() -> None:
    slots = AdapterSlots[str](1)
    slots.hold("a:1", "an adapter")
    with pytest.raises(AlreadyExistsError):
        slots.hold("a:1", "another one")
    with pytest.raises(OverloadedError, match="all 1 adapter slots are taken"):
        slots.hold("b:1", "another one")
    assert slots.held == {"a:1": "an adapter"}
    del slots.held["a:1"]
    slots.hold("b:1", "another one")


def test_without_slots_there_is_no_lora() -> None:
    with pytest.raises(UnsupportedError, match="loaded without LoRA"):
        AdapterSlots[str](0).check_free("a:1")


def test_numbers_are_above_0_and_never_come_twice() -> None:
    slots = AdapterSlots[int](3)
    assert [slots.new_number() for _ in range(3)] == [1, 2, 3]


def test_an_adapter_of_the_start_that_does_not_load_is_named() -> None:
    installed = []

    def prepare(key: str, folder: Path) -> Path:
        if key == "b:1":
            raise InvalidRequestError("there is nothing")
        return folder / key

    with pytest.raises(InvalidRequestError, match=r"LoRA adapter b:1: there is nothing"):
        load_configured({"a:1": "/x", "b:1": "/y"}, prepare, lambda key, prepared: installed.append((key, prepared)))
    assert installed == [("a:1", Path("/x/a:1"))]
