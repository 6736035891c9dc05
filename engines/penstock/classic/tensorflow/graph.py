"""A loaded graph: its session, and which of its tensors the model's inputs and outputs are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.described import DescribedModel, DescribedTensor
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput
from penstock.classic.tensorflow.library import explain, load_tensorflow
from penstock.classic.tensorflow.settings import TensorFlowSettings
from penstock.classic.tensors import datatype_called
from penstock.engines.host.cores import usable_cores

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
    signatures = {key: found for key, found in loaded.signature_def.items() if key not in _NO_SIGNATURES}
    signature = signatures[_chosen_signature(settings, signatures)]
    kinds = (signature.inputs, signature.outputs)
    first, second = ({name: kind[name].name for name in sorted(kind)} for kind in kinds)
    return first, second


def _chosen_tags(settings: TensorFlowSettings, tags: list[list[str]]) -> list[str]:
    wanted = settings.tag or _DEFAULT_TAG
    for found in tags:
        if wanted in found:
            return found
    if len(tags) == 1 and not settings.tag:
        return tags[0]
    known = ", ".join(sorted({tag for found in tags for tag in found}))
    raise ValueError(f"'{settings.path.name}' has no graph with the tag '{wanted[:100]}' (TF_GRAPH_TAG), only {known}")


def _chosen_signature(settings: TensorFlowSettings, signatures: Iterable[str]) -> str:
    known = sorted(signatures)
    if settings.signature in known or (not settings.signature and known):
        return settings.signature or (_DEFAULT_SIGNATURE if _DEFAULT_SIGNATURE in known else known[0])
    wanted, has = settings.signature or _DEFAULT_SIGNATURE, ", ".join(known) or "none"
    raise ValueError(f"'{settings.path.name}' has no signature '{wanted[:100]}' (TF_SIGNATURE_DEF), only {has}")


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
