"""What fronts are told of the models, and when."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.base import reports_ready
from penstock.engines import errors as tree
from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.processes.model_host.messages import (
    Described,
    Published,
    decode_down,
    encode,
    to_error,
    to_fields,
)
from penstock.gateway.processes.model_host.publication import Publication, Sources, is_classic
from penstock.gateway.processes.model_host.remote_calls import RemoteCalls
from penstock.gateway.processes.model_host.remote_models import RemoteModels
from support.kserve import FakeModelStore, add_sub, identity


def publication(store: FakeModelStore) -> Publication:
    return Publication(Sources(cast(Any, store), SharedMemoryRegions(False), Tracing(), serves=lambda model: True))


def told(front: RemoteModels, messages: list[Described | Published]) -> None:
    """As they arrive over the wire."""
    for message in messages:
        received = decode_down(encode(message))
        if isinstance(received, Described):
            front.describe(received)
        elif isinstance(received, Published):
            front.publish(received)


async def test_fronts_are_told_of_changes_and_of_nothing_else() -> None:
    model = add_sub()
    store = FakeModelStore(model)
    published = publication(store)
    first = published.look()
    assert [type(message) for message in first] == [Described, Published]
    assert published.look() == []
    model.ready = False
    [message] = published.look()
    assert isinstance(message, Published)
    assert message.models == [(1, False, True)]
    assert published.generation == 2


async def test_a_model_that_is_loaded_again_is_another_one() -> None:
    store = FakeModelStore(add_sub())
    published = publication(store)
    published.look()
    store.by_name["add_sub"][1] = add_sub()
    described, message = published.look()
    assert isinstance(described, Described)
    assert described.key == 2
    assert isinstance(message, Published)
    assert message.models == [(2, True, True)]


def unconnected() -> RemoteModels:
    connection: Any = None
    return RemoteModels(RemoteCalls(connection))


async def test_fronts_know_what_a_model_says_of_itself_and_send_it_requests() -> None:
    model = add_sub()
    published, front = publication(FakeModelStore(model)), unconnected()
    model.says_ready = False
    told(front, published.look())
    found = front.find("add_sub", "1")
    assert found is not None
    assert front.has("add_sub", "1")
    assert not reports_ready(found)
    model.says_ready = True
    told(front, published.look())
    assert reports_ready(found)


versions = st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(1, 4), min_size=1), max_size=3)


@given(st.lists(versions, min_size=1, max_size=6), st.integers(0, 5))
async def test_every_front_finds_what_the_host_has(history: list[dict[str, set[int]]], late: int) -> None:
    """Whether it has heard every change, or has come late."""
    store = FakeModelStore()
    published = publication(store)
    early, other = unconnected(), unconnected()
    for number, wanted in enumerate(history):
        store.by_name = {
            name: {each: store.by_name.get(name, {}).get(each) or add_sub(name, each) for each in numbers}
            for name, numbers in wanted.items()
        }
        changes = published.look()
        told(early, changes)
        if number == late:
            told(other, published.whole())
        elif number > late:
            told(other, changes)
    for front in (early, other) if late < len(history) else (early,):
        for name in "abc":
            for version in ("", "1", "2", "3", "4"):
                known = wanted.get(name, set())
                expected = (max(known) if known else None) if version == "" else int(version)
                found = front.find(name, version)
                assert (found.version if found is not None else None) == (expected if expected in known else None)
                assert front.has(name, version) == (expected in known)


def test_language_models_are_left_to_the_process_that_has_the_client() -> None:
    assert not is_classic(cast(Any, identity("FP32")))


def _errors() -> list[type[PenstockError]]:
    found = [value for value in vars(tree).values() if isinstance(value, type) and issubclass(value, PenstockError)]
    return [each for each in found if each is not tree.NoResourcesError]


@pytest.mark.parametrize("kind", _errors())
def test_errors_come_out_as_they_went_in(kind: type[PenstockError]) -> None:
    error = to_error(to_fields(kind("a text", param="a", retry_after=2.5)))
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after) == ("a text", "a", 2.5)


def test_nothing_is_told_of_errors_outside_the_tree() -> None:
    assert "secret" not in to_error(to_fields(ValueError("secret"))).message
