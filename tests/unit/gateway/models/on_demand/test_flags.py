"""Which settings of loading on demand fit together."""

from __future__ import annotations

import pytest

from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.other_models import RepositoryConfig
from penstock.gateway.server.composition.models import build_on_demand

ON = RepositoryConfig(load_on_demand=True, model_control_mode="explicit")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (RepositoryConfig(load_on_demand=True), "load-on-demand: needs --model-control-mode=explicit"),
        (RepositoryConfig(load_on_demand=True, model_control_mode="poll"), "load-on-demand: needs"),
        (RepositoryConfig(unload_after_idle=5), "unload-after-idle: needs --load-on-demand"),
        (RepositoryConfig(load_on_demand_wait=5), "load-on-demand-wait: needs --load-on-demand"),
        (RepositoryConfig(load_on_demand_queue=5), "load-on-demand-queue: needs --load-on-demand"),
    ],
)
def test_flags_that_do_not_fit_together(config: RepositoryConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_on_demand(Config(repository=config))


def test_it_is_off_by_default() -> None:
    assert build_on_demand(Config()) is None
    assert build_on_demand(Config(repository=ON)) is not None
