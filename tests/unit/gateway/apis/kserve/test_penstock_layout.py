"""Models of the backend `penstock`: what of the server's settings they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.configuration.config import load_config
from penstock.gateway.configuration.sections.language_model import ModelSettings, ReplicaConfig
from penstock.gateway.models.language.kserve.penstock_layout import PenstockLayout
from support.language_repository import context


@pytest.mark.parametrize(("given", "revision"), [({}, None), ({"revision": "v2"}, "v2")])
def test_the_command_line_s_revision_is_not_theirs(tmp_path: Path, given: dict[str, str], revision: str | None) -> None:
    config = configure(tmp_path, given, {"model": "org/model", "revision": "v1"})
    assert (config.model.model, config.model.revision) == ("org/other", revision)


@pytest.mark.parametrize(
    ("given", "server", "speculative", "most"),
    [
        ({}, {"speculative": "mtp", "max_draft_tokens": 4}, "off", 8),
        ({"speculative": "mtp"}, {"speculative": "mtp", "max_draft_tokens": 4}, "mtp", 4),
        ({}, {"speculative_model": "./draft", "max_draft_tokens": 4}, "off", 8),
        ({"speculative_model": "org/draft"}, {"max_draft_tokens": 4, "speculative_model": "./draft"}, "off", 4),
        ({}, {"speculative": "ngram", "max_draft_tokens": 4}, "ngram", 4),
    ],
)
def test_the_command_line_s_draft_head_is_not_theirs(
    tmp_path: Path, given: dict[str, str], server: dict[str, Any], speculative: str, most: int
) -> None:
    config = configure(tmp_path, given, server)
    assert config.model.speculative_model == given.get("speculative_model")
    assert (config.scheduling.speculative, config.scheduling.max_draft_tokens) == (speculative, most)


def test_the_command_line_s_replicas_are_not_theirs(tmp_path: Path) -> None:
    server = {"replicas": 3, "resume": "on", "replica_routing": "round-robin"}
    assert configure(tmp_path / "a", {}, server).replication == ReplicaConfig()
    given = {"replicas": 2, "resume_wait": 5}
    assert configure(tmp_path / "b", given, server).replication == ReplicaConfig(replicas=2, resume_wait=5)


def configure(folder: Path, given: dict[str, Any], server: dict[str, Any]) -> ModelSettings:
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "penstock"')
    (version / "model.json").write_text(json.dumps({"model": "org/other", **given}))
    return PenstockLayout().configure(load_config(server, environ={}).models, context(version))


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
    assert configure(tmp_path, given, {"kv_offload_dir": "/kv"}).cache.kv_offload_dir == folder
