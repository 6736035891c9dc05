from __future__ import annotations

from collections.abc import Iterator

import pytest

from differential import triton_server
from differential.peers import MODELS, Pair, both


@pytest.fixture(scope="session")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Every model, loaded and unloaded by request."""
    flags = ("--model-control-mode=explicit", "--load-model=*", "--cache-config=local,size=1048576")
    limits = ("--rate-limit=execution_count", "--rate-limit-resource=slots:2")
    yield from _pair(tmp_path_factory, sorted(MODELS.iterdir()), *flags, *limits)


@pytest.fixture(scope="session")
def uncontrolled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One model and no control of it."""
    yield from _pair(tmp_path_factory, [MODELS / "add_sub"])


def _pair(tmp: pytest.TempPathFactory, models: list, *flags: str) -> Iterator[Pair]:  # type: ignore[type-arg]
    environment = triton_server.environment()
    if environment is None:
        pytest.skip(f"{triton_server.VARIABLE} names no environment with Triton (tests/differential/triton_server.py)")
    with both(environment, tmp.mktemp("differential"), [model.name for model in models], *flags) as pair:
        yield pair
