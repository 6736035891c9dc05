"""pb_utils.ModelConfig: what auto_complete_config fills in."""

from __future__ import annotations

import json
from typing import Any

_SCHEDULERS = ("sequence_batching", "ensemble_scheduling")


class ModelConfig:
    """A model configuration that may be completed, but not contradicted."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The configuration, to be read."""
        return self._model_config

    @property
    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._model_config['name']}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError when the configuration has a larger one."""
        size = self._model_config["max_batch_size"]
        if size > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {size}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises ValueError when the configuration has another scheduler."""
        other = next((name for name in _SCHEDULERS if name in self._model_config), None)
        if other is not None:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for model "
                f"'{self._model_config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
            )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """`name`, `data_type`, `dims` and perhaps `optional`. Raises ValueError when something is missing, unknown or
        not what the configuration says."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        """`name`, `data_type` and `dims`. Raises ValueError as add_input does."""
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, kind: str, tensor: dict[str, Any], properties: tuple[str, ...]) -> None:
        named = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if any(name not in properties for name in tensor):
            listed = ", ".join(f"'{name}'" for name in properties[:-1]) + f" and '{properties[-1]}'"
            raise ValueError(f"{named} {self._where} contains property other than {listed}.")
        for name in properties[:3]:
            if name not in tensor:
                raise ValueError(f"{named} {self._where} is missing '{name}' property.")
        entries = self._model_config.setdefault(kind, [])
        for entry in entries:
            if entry["name"] == tensor["name"]:
                self._check(kind, entry, tensor)
                entry.update(tensor)
                return
        entries.append(dict(tensor))

    def _check(self, kind: str, entry: dict[str, Any], tensor: dict[str, Any]) -> None:
        model, name = self._model_config["name"], tensor["name"]
        data_type = entry.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {data_type} for {kind} '{name}', "
                f"model provides {tensor['data_type']}"
            )
        dims = entry.get("dims")
        if dims and list(dims) != list(tensor["dims"]):
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects dims {list(tensor['dims'])} but the model "
                f"configuration specifies dims {list(dims)}"
            )
        if entry.get("optional") and tensor.get("optional") is False:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects optional False but the model configuration "
                "specifies optional True"
            )

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """`decoupled`. Raises ValueError when the configuration is decoupled and the model is not."""
        if any(name != "decoupled" for name in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model "
                f"'{self._model_config['name']}' contains property other than 'decoupled'."
            )
        if "decoupled" not in transaction_policy_dict:
            return
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if policy.get("decoupled", transaction_policy_dict["decoupled"]) != transaction_policy_dict["decoupled"]:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._model_config['name']}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = transaction_policy_dict["decoupled"]
