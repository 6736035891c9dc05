"""The labels of a model version in Triton's families."""

from __future__ import annotations

from penstock.classic.base import InferModel


def model_labels(model: InferModel) -> dict[str, str]:
    """With the model's `metric_tags`, before whose names Triton puts an underscore."""
    tags = {f"_{name}": value for name, value in model.config.metric_tags.items()}
    return version_labels(model.name, model.version) | tags


def version_labels(name: str, version: int) -> dict[str, str]:
    return {"model": name, "version": str(version)}
