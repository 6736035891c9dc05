"""How many fronts a server has."""

from __future__ import annotations

import pytest

from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.server import front_ports
from penstock.gateway.server.front_ports import front_count


@pytest.mark.parametrize(("cores", "fronts"), [(2, 1), (15, 1), (16, 2), (48, 6), (256, 8)])
def test_auto_is_one_for_every_8_cores(cores: int, fronts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ports, "usable_cores", lambda: cores)
    assert front_count(overlay(Config(), {"fronts": "auto"})) == fronts


def test_the_operator_s_number_counts() -> None:
    assert front_count(overlay(Config(), {"fronts": 3})) == 3
    with pytest.raises(ConfigError, match="fronts"):
        overlay(Config(), {"fronts": 0})


def test_what_several_fronts_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fronts: several need --grpc-transport=penstock"):
        front_count(overlay(Config(), {"fronts": 2, "grpc_transport": "grpcio"}))
    assert front_count(overlay(Config(), {"fronts": 1, "grpc_transport": "grpcio"})) == 1
