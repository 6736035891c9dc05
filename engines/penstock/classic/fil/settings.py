"""What the parameters of a `fil` model say, in Triton's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.parameters import flag, number, strings, thread_count, whole_number

INSTALL = "'penstock-server[fil]'"
"""What pip installs for the libraries."""
FILENAMES = {
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""By `model_type`."""

_CHOICES = {
    "algo": {"ALGO_AUTO", "NAIVE", "TREE_REORG", "BATCH_TREE_REORG"},
    "storage_type": {"AUTO", "DENSE", "SPARSE", "SPARSE8"},
}
_COUNTS = ("blocks_per_sm", "threads_per_tree", "transfer_threshold", "chunk_size")
_FLAGS = ("use_experimental_optimizations", "xgboost_allow_unknown_field")
"""These tune Triton's own library and change no answer. They have no effect here, but must be valid."""


@dataclass(frozen=True, slots=True)
class FilSettings:
    model_type: str
    path: Path
    threads: int
    """Of each instance."""
    is_classifier: bool
    """Without `probabilities`, answers are classes and not the model's scores."""
    probabilities: bool
    """A classifier's answers are probabilities, also where the model was trained to answer classes."""
    threshold: float
    """The probability above which the answer of a binary classifier is 1."""

    @property
    def answers_class(self) -> bool:
        return self.is_classifier and not self.probabilities


def read_settings(config: ModelConfig, version_folder: Path) -> FilSettings:
    """Raises ValueError that names the parameter, or the file that is missing."""
    values = strings(config)
    for key, choices in _CHOICES.items():
        if values.get(key, min(choices)) not in choices:
            raise ValueError(
                f"parameter '{key}' must be one of {', '.join(sorted(choices))}, not '{values[key][:100]}'"
            )
    for key in _COUNTS:
        whole_number(values, key)
    for key in _FLAGS:
        flag(values, key, False)
    model_type = values.get("model_type") or _by_file(config, version_folder)
    if model_type not in FILENAMES:
        raise ValueError(f"parameter 'model_type' must be one of {', '.join(FILENAMES)}, not '{model_type[:100]}'")
    return FilSettings(
        model_type=model_type,
        path=model_path(config, version_folder, FILENAMES[model_type]),
        threads=_threads(values),
        is_classifier=flag(values, "is_classifier", flag(values, "output_class", False)),
        probabilities=flag(values, "predict_proba", False),
        threshold=number(values, "threshold", 0.5),
    )


def _threads(values: Mapping[str, str]) -> int:
    """One, unless the model says more: the libraries' threads spin while they wait for each other, and beside the
    server's own work on the same cores two were measured to be up to 70 times slower than one."""
    automatic = values.get("cpu_nthread", "").strip() in ("", "-1")
    return (0 if automatic else thread_count(values, "cpu_nthread")) or 1


def _by_file(config: ModelConfig, version_folder: Path) -> str:
    """Triton takes a missing `model_type` for XGBoost's old binary format; here the file's name tells."""
    if config.default_model_filename:
        found = [
            kind for kind, name in FILENAMES.items() if Path(name).suffix == Path(config.default_model_filename).suffix
        ]
    else:
        found = [kind for kind, name in FILENAMES.items() if (version_folder / name).is_file()]
    if len(found) != 1:
        names = ", ".join(FILENAMES.values())
        raise ValueError(f"model '{config.name}' needs the parameter 'model_type', or exactly one of the files {names}")
    return found[0]
