"""Which of PyTorch's formats a model's file has."""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path

FILENAMES = ("model.pt", "model.pt2")


class Format(Enum):
    TORCHSCRIPT = "TorchScript"
    EXPORTED = "torch.export"
    COMPILED = "AOTInductor"


def model_file(config: ModelConfig, version_folder: Path) -> tuple[Path, Format]:
    """Raises ValueError when there is no file, or it is none that is served."""
    path = model_path(config, version_folder, *FILENAMES)
    return path, _format(path)


def _format(path: Path) -> Format:
    """By the names in the archive; nothing is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        raise ValueError(
            f"'{path.name}' is neither TorchScript (torch.jit.save) nor a .pt2 archive (torch.export.save, AOTInductor)"
        ) from None
    if any(name.startswith("data/aotinductor/") for name in names):
        return Format.COMPILED
    if any(name.startswith("models/") for name in names) or "serialized_exported_program.json" in names:
        return Format.EXPORTED
    if any(name.startswith("code/") for name in names):
        return Format.TORCHSCRIPT
    raise ValueError(
        f"'{path.name}' is what torch.save writes: weights or a pickled module, which are not loaded. Save the model"
        ' with torch.jit.save or torch.export.save, or give its class in a model.py with runtime: "model.py"'
    )
