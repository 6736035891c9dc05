"""Client frameworks against a running server. `.ci/clients` installs them in environments of their own; elsewhere each
file skips itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
