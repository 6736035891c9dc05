"""KServe over HTTP from a front process's half of the model host's border: what holds for a server of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol import test_kserve_http
from protocol.test_kserve_http import (  # noqa: F401
    client,
    test_a_client_that_hangs_up_is_noticed,
    test_a_large_tensor,
    test_classification,
    test_errors_reach_the_client,
    test_every_datatype_in_binary,
    test_half_floats_in_json,
    test_health_and_metadata,
    test_parameters_and_sequences,
    test_raw_bodies,
    test_shared_memory,
)
from support.kserve_http import KServeServer


@pytest.fixture(scope="module")
def server() -> Iterator[KServeServer]:
    with KServeServer(
        test_kserve_http.models(), from_a_front=True, allow_shared_memory=True, version="1.2.3"
    ) as server:
        yield server
