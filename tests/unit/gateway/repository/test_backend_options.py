"""Settings of backends on the command line, in Triton's two forms."""

from __future__ import annotations

import pytest

from penstock.gateway.composition.models import repository_settings
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.other_models import RepositoryConfig


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
