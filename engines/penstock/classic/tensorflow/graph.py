"""A loaded graph: the settings in Triton's names, its session, and which of its tensors are the model's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.frameworks import DescribedModel, DescribedTensor, load_package
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput
from penstock.classic.model_files import model_path
from penstock.classic.parameters import choice, flag, strings, thread_count, whole_number
from penstock.classic.tensors import datatype_called
from penstock.engines.host.cores import usable_cores

_NODES = re.compile(r"\s*\[\[.*?\]\]", re.DOTALL)
_HEAD = re.compile(r"^\s*(?:Graph execution error:\s*)?(?:Detected at node.*?\n\n)?", re.DOTALL)
_PATHS = re.compile(r"/[^\s\"';]*/")


def is_installed() -> bool:
    """Nothing is imported for it."""
    return importlib.util.find_spec("tensorflow") is not None


@cache
def load_tensorflow() -> Any:
    """The module. Raises ValueError that says how to install it."""
    # what fails in a request is that request's answer; TensorFlow would write about its build and every failure
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tensorflow = load_package("tensorflow", "models with TF_RUNTIME tensorflow", "'penstock-server[tensorflow]'")
    tensorflow.get_logger().setLevel("ERROR")
    return tensorflow


def explain(error: Exception) -> str:
    """A text without the graph's nodes, where they were made, and folders of this machine."""
    text = _HEAD.sub("", str(getattr(error, "message", error)))
    text = _PATHS.sub("", _NODES.sub("", text.partition("Original stack trace")[0]))
    return " ".join(text.split())[:400] or type(error).__name__


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
        chosen = choice(values, "TF_RUNTIME", _RUNTIMES)
    elif "runtime" in options:
        chosen = choice(options, "runtime", _RUNTIMES)
    else:
        chosen = "tensorflow" if is_installed() else "openvino"
    if chosen == "openvino":
        for key in _ONLY_TENSORFLOW:
            if key in values:
                raise ValueError(
                    f"parameter '{key}' of model '{config.name}' needs TensorFlow itself, and this model is run by"
                    " OpenVINO: pip install 'penstock-server[tensorflow]', or TF_RUNTIME must not be openvino"
                )
    return chosen


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
        names = json.loads(path.read_bytes())["init_ops"]
        if isinstance(names, list) and all(isinstance(item, str) for item in names):
            return tuple(names)
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f'\'{name}\' must be JSON with a list of names: {{"init_ops": ["init"]}}')


_DEFAULT_TAG = "serve"
_DEFAULT_SIGNATURE = "serving_default"
_NO_SIGNATURES = frozenset({"__saved_model_init_op", "__saved_model_train_op"})


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """`session.run` may be called from several threads at a time."""

    session: Any
    inputs: Mapping[str, Any]
    """Tensors of the graph, by the names that requests use."""
    outputs: Mapping[str, Any]

    def describe(self, config: ModelConfig) -> DescribedModel:
        """Tensors whose number of dims the graph does not know have the configuration's."""
        known = {tensor.name: tensor for tensor in _configured(config)}
        described = (
            tuple(_describe(name, tensor, config, known.get(name)) for name, tensor in tensors.items())
            for tensors in (self.inputs, self.outputs)
        )
        return DescribedModel(*described)

    def close(self) -> None:
        self.session.close()


def load_graph(settings: TensorFlowSettings, config: ModelConfig) -> LoadedGraph:
    """Raises ValueError when the files are no model, or have no such tag, signature or tensor."""
    tensorflow = load_tensorflow()
    session = tensorflow.compat.v1.Session(graph=tensorflow.Graph(), config=_session_config(tensorflow, settings))
    try:
        with session.graph.as_default():
            names = _import(tensorflow, session, settings, config)
        inputs, outputs = ({name: _tensor(session.graph, place) for name, place in kind.items()} for kind in names)
    except BaseException as error:
        session.close()
        if isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise ValueError(f"'{settings.path.name}' cannot be loaded: {explain(error)}") from error
    return LoadedGraph(session, inputs, outputs)


def _session_config(tensorflow: Any, settings: TensorFlowSettings) -> Any:
    return tensorflow.compat.v1.ConfigProto(
        intra_op_parallelism_threads=settings.intra_threads or usable_cores(),
        inter_op_parallelism_threads=settings.inter_threads or usable_cores(),
        use_per_session_threads=settings.own_threads,
        device_count={"GPU": 0},
    )


Names = Mapping[str, str]
"""Of the graph's tensors, by those of inputs or of outputs."""


def _import(tensorflow: Any, session: Any, settings: TensorFlowSettings, config: ModelConfig) -> tuple[Names, Names]:
    if settings.is_graph_def:
        return _import_graph_def(tensorflow, session, settings, config)
    return _import_saved_model(tensorflow, session, settings)


def _import_graph_def(
    tensorflow: Any, session: Any, settings: TensorFlowSettings, config: ModelConfig
) -> tuple[Names, Names]:
    definition = tensorflow.compat.v1.GraphDef()
    definition.ParseFromString(settings.path.read_bytes())
    tensorflow.import_graph_def(definition, name="")
    for name in settings.init_ops:
        session.run(session.graph.get_operation_by_name(name))
    inputs = [*config.input, *server_inputs(config)]
    outputs = [*config.output, *state_outputs(config)]
    first, second = ({tensor.name: tensor.name for tensor in kind} for kind in (inputs, outputs))
    return first, second


def _import_saved_model(tensorflow: Any, session: Any, settings: TensorFlowSettings) -> tuple[Names, Names]:
    saved_model = tensorflow.compat.v1.saved_model
    parsed = tensorflow.__internal__.saved_model.parse_saved_model(str(settings.path))
    tags = [sorted(graph.meta_info_def.tags) for graph in parsed.meta_graphs]
    loaded = saved_model.loader.load(session, _chosen_tags(settings, tags), str(settings.path))
    signatures = {key: definition for key, definition in loaded.signature_def.items() if key not in _NO_SIGNATURES}
    signature = signatures[_chosen_signature(settings, signatures)]
    kinds = (signature.inputs, signature.outputs)
    first, second = ({name: kind[name].name for name in sorted(kind)} for kind in kinds)
    return first, second


def _chosen_tags(settings: TensorFlowSettings, tags: list[list[str]]) -> list[str]:
    chosen = settings.tag or _DEFAULT_TAG
    for tag_set in tags:
        if chosen in tag_set:
            return tag_set
    if len(tags) == 1 and not settings.tag:
        return tags[0]
    known = ", ".join(sorted({tag for tag_set in tags for tag in tag_set}))
    raise ValueError(f"'{settings.path.name}' has no graph with the tag '{chosen[:100]}' (TF_GRAPH_TAG), only {known}")


def _chosen_signature(settings: TensorFlowSettings, signatures: Iterable[str]) -> str:
    known = sorted(signatures)
    if settings.signature in known or (not settings.signature and known):
        return settings.signature or (_DEFAULT_SIGNATURE if _DEFAULT_SIGNATURE in known else known[0])
    chosen, has = settings.signature or _DEFAULT_SIGNATURE, ", ".join(known) or "none"
    raise ValueError(f"'{settings.path.name}' has no signature '{chosen[:100]}' (TF_SIGNATURE_DEF), only {has}")


def _tensor(graph: Any, name: str) -> Any:
    if not name:
        raise ValueError("a sparse or composite tensor of the signature cannot be served")
    try:
        return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError) as error:
        raise ValueError(f"the graph has no tensor '{name[:100]}'") from error


def _configured(config: ModelConfig) -> Iterable[ModelInput | ModelOutput]:
    return (*config.input, *server_inputs(config), *config.output, *state_outputs(config))


def _describe(
    name: str, tensor: Any, config: ModelConfig, configured: ModelInput | ModelOutput | None
) -> DescribedTensor:
    kind = tensor.dtype.base_dtype.name
    if tensor.shape.rank is not None:
        shape = tuple(-1 if size is None else int(size) for size in tensor.shape.as_list())
    elif configured is None:
        raise ValueError(f"'{name}' has any number of dimensions: config.pbtxt must say how many")
    else:
        dims = configured.reshape.shape if configured.HasField("reshape") else configured.dims
        shape = (*([-1] if config.max_batch_size else []), *dims)
    return DescribedTensor(name, datatype_called(kind), shape)
