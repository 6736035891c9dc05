"""What the parameters of a `tensorflow` model say, in Triton's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.parameters import choice, flag, strings, thread_count, whole_number
from penstock.classic.tensorflow.library import is_installed

SAVED_MODEL, GRAPH_DEF = "model.savedmodel", "model.graphdef"
GRAPH_DEF_PLATFORM = "tensorflow_graphdef"

_RUNTIMES = {"tensorflow": "tensorflow", "openvino": "openvino"}
_ONLY_TENSORFLOW = (
    *("TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS", "TF_USE_PER_SESSION_THREADS", "TF_GRAPH_TAG"),
    *("TF_SIGNATURE_DEF", "TF_INIT_OPS_FILE", "MAX_SESSION_SHARE_COUNT"),
)


@dataclass(frozen=True, slots=True)
class TensorFlowSettings:
    path: Path
    is_graph_def: bool
    intra_threads: int
    """0: as many as the process has cores."""
    inter_threads: int
    own_threads: bool
    """Each session has threads of its own; else the first session's are everybody's."""
    tag: str
    """Of the graph in a SavedModel; empty: `serve`, or the only one."""
    signature: str
    """Empty: `serving_default`, or the first one by name."""
    init_ops: tuple[str, ...]
    """Run once after a GraphDef has been loaded."""
    session_share: int
    """How many instances use one session."""


def runtime(config: ModelConfig, options: Mapping[str, str]) -> str:
    """`tensorflow` or `openvino`: what the model says, else what the backend's option says, else TensorFlow where it is
    installed. Raises ValueError for a parameter that OpenVINO does not have."""
    values = strings(config)
    if "TF_RUNTIME" in values:
        found = choice(values, "TF_RUNTIME", _RUNTIMES)
    elif "runtime" in options:
        found = choice(options, "runtime", _RUNTIMES)
    else:
        found = "tensorflow" if is_installed() else "openvino"
    if found == "openvino":
        for key in _ONLY_TENSORFLOW:
            if key in values:
                raise ValueError(
                    f"parameter '{key}' of model '{config.name}' needs TensorFlow itself, and this model is run by"
                    " OpenVINO: pip install 'penstock-server[tensorflow]', or TF_RUNTIME must not be openvino"
                )
    return found


def read_settings(config: ModelConfig, version_folder: Path) -> TensorFlowSettings:
    """Raises ValueError that names the parameter, or the file that is missing."""
    values = strings(config)
    default = GRAPH_DEF if config.platform == GRAPH_DEF_PLATFORM else SAVED_MODEL
    path = model_path(config, version_folder, default)
    return TensorFlowSettings(
        path=path,
        is_graph_def=path.is_file(),
        intra_threads=thread_count(values, "TF_NUM_INTRA_THREADS"),
        inter_threads=thread_count(values, "TF_NUM_INTER_THREADS"),
        own_threads=flag(values, "TF_USE_PER_SESSION_THREADS", False),
        tag=values.get("TF_GRAPH_TAG", ""),
        signature=values.get("TF_SIGNATURE_DEF", ""),
        init_ops=_init_ops(values["TF_INIT_OPS_FILE"], version_folder) if "TF_INIT_OPS_FILE" in values else (),
        session_share=max(1, whole_number(values, "MAX_SESSION_SHARE_COUNT", 1)),
    )


def _init_ops(name: str, version_folder: Path) -> tuple[str, ...]:
    """From a file in the version's folder, or else in the model's."""
    if Path(name).name != name:
        raise ValueError(f"parameter 'TF_INIT_OPS_FILE' must be the name of a file, not '{name[:100]}'")
    for path in (version_folder / name, version_folder.parent / name):
        if path.is_file():
            break
    else:
        raise ValueError(f"unable to find '{name}', the file that TF_INIT_OPS_FILE names")
    try:
        found = json.loads(path.read_bytes())["init_ops"]
        if isinstance(found, list) and all(isinstance(item, str) for item in found):
            return tuple(found)
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f'\'{name}\' must be JSON with a list of names: {{"init_ops": ["init"]}}')
