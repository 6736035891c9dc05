"""One cluster for all tests here. They run where Ray is installed: `.ci/ray`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from ray_serve.cluster import RayCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    found = RayCluster(tmp_path_factory.mktemp("ray"))
    try:
        yield found
    finally:
        found.stop()
