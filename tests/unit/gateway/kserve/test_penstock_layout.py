"""Models of the backend `penstock`: what of the server's settings they share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers_language_repository import context
from penstock.gateway.configuration.config import load_config
from penstock.gateway.llm.kserve.penstock_layout import PenstockLayout


@pytest.mark.parametrize(("given", "revision"), [({}, None), ({"revision": "v2"}, "v2")])
def test_the_command_line_s_revision_is_not_theirs(tmp_path: Path, given: dict[str, str], revision: str | None) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "penstock"')
    (version / "model.json").write_text(json.dumps({"model": "org/other", **given}))
    server = load_config({"model": "org/model", "revision": "v1"}, environ={})
    config = PenstockLayout().configure(server, context(version))
    assert (config.model.model, config.model.revision) == ("org/other", revision)


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "/kv"),
        ({"engine": "torch"}, None),
        ({"prefix_caching": False}, None),
        ({"engine": "torch", "kv_offload_dir": "/own"}, "/own"),
    ],
)
def test_evicted_blocks_are_kept_where_the_engine_can(
    tmp_path: Path, given: dict[str, object], folder: str | None
) -> None:
    """A model's own setting is refused later where its engine cannot."""
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "penstock"')
    (version / "model.json").write_text(json.dumps({"model": "org/other", **given}))
    server = load_config({"kv_offload_dir": "/kv"}, environ={})
    assert PenstockLayout().configure(server, context(version)).cache.kv_offload_dir == folder
