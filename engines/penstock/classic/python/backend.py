"""The python backend: `backend: "python"`, and python-based backends built on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf import json_format

from penstock.classic.base import AsyncInstance, Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.model_config import ModelConfig, config_dict, config_json
from penstock.classic.python.auto_complete import run_auto_complete
from penstock.classic.python.environment import Environment, find_environment
from penstock.classic.python.instance import PythonInstance
from penstock.classic.python.options import PythonOptions
from penstock.classic.python.process import Launch
from penstock.classic.python.session import Program
from penstock.classic.signature import ModelSignature

_HOOK = b"auto_complete_config"
_COMPLETED = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")
"""What auto_complete_config may fill in."""


class PythonBackend(Backend):
    """Runs a model's `model.py` (`default_model_filename`). A python-based backend is a subclass with a `program` of
    its own, or a file `<name>/model.py` in the folder of the option `backend-directory`."""

    program: ClassVar[Path | None] = None

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._options = PythonOptions.parse(options)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        program = self._program(config, version_folder)
        complete = bool(config.input) and bool(config.output)
        if complete and _HOOK not in program.read_bytes():
            return
        environment = _environment(config, version_folder.parent)
        try:
            launch = Launch(environment, self._options, f"penstock.models.{config.name}")
            options = {
                "program": str(program),
                "version_folder": str(version_folder),
                "config": config_json(config),
                "name": config.name,
            }
            found = run_auto_complete(launch, options)
        finally:
            environment.remove()
        if found is not None:
            _complete(config, found)

    def load_model(self, context: ModelContext) -> BackendModel:
        return PythonModel(context, self._options, self._program(context.config, context.version_folder))

    def _program(self, config: ModelConfig, version_folder: Path) -> Path:
        """Raises ValueError when there is no such file."""
        if self.program is not None:
            return self.program
        name = config.default_model_filename or "model.py"
        if config.runtime not in ("", "python", "model.py", name):
            raise ValueError(f"model '{config.name}': the python backend has no runtime '{config.runtime[:64]}'")
        if not name.endswith(".py") or "/" in name or name.startswith("."):
            raise ValueError(f"Model name must end with '.py'. Model name is \"{name[:64]}\".")
        own = version_folder / name
        folder = self._options.backend_directory
        shared = None if folder is None or config.backend == "python" else folder / config.backend / "model.py"
        found = next((path for path in (own, shared) if path is not None and path.is_file()), None)
        if found is None:
            raise ValueError(f"Python model file not found in '{config.name}/{version_folder.name}/{name}'")
        return found


class PythonModel(BackendModel):
    """A version: its interpreter, and what all its instances are told."""

    def __init__(self, context: ModelContext, options: PythonOptions, program: Path) -> None:
        self._context = context
        self._options = options
        self._program = program
        self._signature = ModelSignature(context.config)
        self._config = config_json(context.config)
        self._environment = _environment(context.config, context.model_folder)

    def load_instance(self, context: InstanceContext) -> AsyncInstance:
        model = self._context
        init = {
            "name": context.name,
            "file": self._program.name,
            "program": str(self._program),
            "version_folder": str(model.version_folder),
            "decoupled": self._signature.decoupled,
            "sequences": self._signature.sequences,
            "iterative": self._signature.iterative,
            "outputs": list(self._signature.outputs),
            "args": {
                "model_config": self._config,
                "model_instance_kind": context.kind,
                "model_instance_name": context.name,
                "model_instance_device_id": str(context.device_id),
                "model_repository": str(model.model_folder),
                "model_version": str(model.version),
                "model_name": model.name,
            },
        }
        launch = Launch(self._environment, self._options, f"penstock.models.{context.name}")
        return PythonInstance(Program(context.name, launch, init, self._signature, model.host))

    def unload(self) -> None:
        self._environment.remove()


def _environment(config: ModelConfig, model_folder: Path) -> Environment:
    parameters = config.parameters
    path = parameters["EXECUTION_ENV_PATH"].string_value if "EXECUTION_ENV_PATH" in parameters else ""
    return find_environment(path, model_folder)


def _complete(config: ModelConfig, found: dict[str, Any]) -> None:
    """Raises ValueError when the model has made something of it that is no configuration."""
    given = {name: found[name] for name in _COMPLETED if name in found}
    try:
        completed = json_format.ParseDict({**config_dict(config), **given}, ModelConfig())
    except json_format.ParseError as error:
        raise ValueError(
            f"auto_complete_config of model '{config.name}' gave no valid configuration: {error}"
        ) from None
    config.CopyFrom(completed)
