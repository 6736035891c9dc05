"""What is started before the gateway has looked at the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.configuration import likely_engine as likely
from penstock.gateway.configuration.config import load_config


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "openvino"),
        ({"model": "/models/llm"}, "openvino"),
        ({"engine": "torch"}, "torch"),
        ({"model_repository": ("/models",)}, None),
        ({"model_repository": ("/models",), "model": "/models/llm"}, "openvino"),
        ({"replicas": 2}, None),
        ({"engine_address": "ipc:///run/door"}, None),
        ({"cpus": "0"}, None),
    ],
)
def test_by_the_settings_alone(settings: dict[str, Any], engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likely, "visible_gpus", lambda: 0)
    assert likely.likely_engine(load_config(settings)) == engine


def test_none_where_the_model_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likely, "visible_gpus", lambda: 1)
    assert likely.likely_engine(load_config({})) is None
    monkeypatch.setattr(likely, "visible_gpus", lambda: 0)
    (tmp_path / "modules.json").write_text("[]")
    assert likely.likely_engine(load_config({"model": str(tmp_path)})) is None
