"""The file of a model version that `default_model_filename` names."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.model_config import ModelConfig


def model_path(config: ModelConfig, version_folder: Path, *defaults: str) -> Path:
    """The file or folder `default_model_filename`, or the first of `defaults` that is there.

    Raises ValueError when there is none, or when its name leads out of the version's folder.
    """
    names = [config.default_model_filename] if config.default_model_filename else defaults
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"default_model_filename '{name}' leads out of the model's folder")
        if (version_folder / name).exists():
            return version_folder / name
    where = f"{version_folder.name}/{names[0]}"
    raise ValueError(f"unable to find '{where}' for model '{config.name}'")
