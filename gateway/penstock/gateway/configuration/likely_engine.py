"""A guess at the engine that a server is going to start, from its settings alone."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.host.gpus import visible_gpus
from penstock.gateway.configuration.config import Config


def likely_engine(config: Config) -> str | None:
    """None: none, or several, or one whose process has to be bound to CPUs before it imports anything. The model is not
    looked at: what does that takes long to import."""
    settings, model = config.models, config.models.model
    remote = settings.door.engine_address or settings.replication.replicas != 1
    placed = model.cpus is not None or model.numa_nodes is not None
    vectors = model.model is not None and (Path(model.model) / "modules.json").is_file()
    if not config.has_model or vectors or remote or placed:
        return None
    if model.engine == "auto":
        return None if visible_gpus() else "openvino"
    return model.engine
