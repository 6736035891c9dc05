"""Settings of backends on the command line, in Triton's two forms."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import pytest

from penstock.classic.base import Host, ModelContext
from penstock.classic.batching.rate_limiter import GLOBAL, Resource, Seat
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.other_models import RepositoryConfig
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.settings import build_rate_limiter
from penstock.gateway.server.composition.models import repository_settings
from support.classic import ECHO, model_config


def test_settings_are_of_one_backend_or_of_all() -> None:
    texts = ("onnxruntime,a=1", "onnxruntime,b=x=y,z", "default-max-batch-size=8", ",c=2")
    found = repository_settings(RepositoryConfig(backend_config=texts)).backend_options
    assert found == {
        "onnxruntime": {"a": "1", "b": "x=y,z"},
        "": {"default-max-batch-size": "8", "c": "2"},
    }


@pytest.mark.parametrize("text", ["", "a", "onnxruntime,a", "=1", "onnxruntime,=1"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither BACKEND,KEY=VALUE nor KEY=VALUE"):
        repository_settings(RepositoryConfig(backend_config=(text,)))


FLAGS = ("R1:10", "R2:5:0", "R2:8:1", "R3:2")
"""Those of Triton's guide: R3 is global in a model."""


@pytest.mark.parametrize(
    ("resource", "count"),
    [((0, "R1"), 10), ((1, "R1"), 10), ((0, "R2"), 5), ((1, "R2"), 8), ((GLOBAL, "R3"), 2), ((GLOBAL, "R2"), 8)],
)
def test_how_much_there_is(resource: Resource, count: int) -> None:
    limiter = build_rate_limiter("execution_count", FLAGS)
    assert limiter is not None
    limiter.enter([Seat({resource: count})])
    with pytest.raises(InvalidRequestError, match=f"is limited to {count} which"):
        limiter.enter([Seat({resource: count + 1})])


def test_off_is_off() -> None:
    assert build_rate_limiter("off", ()) is None
    with pytest.raises(ConfigError, match="rate-limit-resource: needs --rate-limit=execution_count"):
        build_rate_limiter("off", FLAGS)


@pytest.mark.parametrize("text", ["R", ":1", "R:", "R:x", "R:-1", "R:1:", "R:1:x", "R:1:2:3", "R:2147483648"])
def test_what_is_no_resource_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^rate-limit-resource: "):
        build_rate_limiter("execution_count", (text,))


def test_variables_separate_resources_by_semicolons() -> None:
    environ = {"PENSTOCK_RATE_LIMIT": "execution_count", "PENSTOCK_RATE_LIMIT_RESOURCE": "R:1;a,b:2"}
    assert load_config({}, environ=environ).repository.rate_limit_resource == ("R:1", "a,b:2")


async def test_the_log_names_models_whose_limits_are_off(caplog: pytest.LogCaptureFixture) -> None:
    group = "instance_group { kind: KIND_CPU rate_limiter { resources [ { name: 'R' count: 1 } ] } }"
    config = model_config(ECHO, group)
    host = cast(Host, None)
    context = ModelContext(
        name="echo", version=1, config=config, model_folder=Path(), version_folder=Path("1"), host=host
    )
    with caplog.at_level(logging.WARNING, "penstock"):
        model = await ClassicLoaders({})("identity").load(context)
    await model.stop()
    assert "model 'echo' has rate limits, and the server has them off (--rate-limit)" in caplog.text
