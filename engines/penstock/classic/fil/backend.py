"""Triton's `fil` backend: forests of decision trees. docs/builtin_backends.md lists what it supports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.fil.forest import FilSettings, Forest, open_forest, read_settings
from penstock.classic.frameworks import (
    DescribedModel,
    DescribedTensor,
    check,
    complete,
    default_max_batch_size,
    is_complete,
)
from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import check_options
from penstock.classic.tensors import Array


class Answers:
    """The rules are those of Triton's backend."""

    def __init__(self, forest: Forest, settings: FilSettings) -> None:
        self._forest = forest
        self._settings = settings
        self.outputs = forest.scores(np.full((1, forest.features), np.nan, np.float32)).shape[1]
        """Of the forest: 1 for regression and for binary classifiers."""

    def width(self, columns: int) -> int:
        """How many numbers the answer for a row has. A binary classifier has one probability or, if 2 are `wanted`,
        that of each class."""
        if self._settings.answers_class:
            return 1
        if self.outputs == 1 and self._settings.probabilities:
            return columns
        return self.outputs

    def of(self, rows: Array, width: int) -> Array:
        """FP32 [rows, width]."""
        scores = self._forest.scores(rows)
        if self._settings.answers_class:
            if self.outputs > 1:
                return scores.argmax(axis=1, keepdims=True).astype(np.float32)
            return (scores > self._settings.threshold).astype(np.float32)
        if width == 2 and self.outputs == 1:
            return np.concatenate([1 - scores, scores], axis=1)
        return scores


INPUT, OUTPUT, SHAP = "input__0", "output__0", "treeshap_output"


class FilBackend(Backend):
    """Option: `default-max-batch-size`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        check_options("fil", options)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        if is_complete(config):
            return
        settings = read_settings(config, version_folder)
        forest = open_forest(settings)
        described = _describe(config, forest, Answers(forest, settings))
        complete(config, described, default_max_batch_size(self.options))

    def load_model(self, context: ModelContext) -> FilModel:
        config = context.config
        settings = read_settings(config, context.version_folder)
        forest = open_forest(settings)
        answers = Answers(forest, settings)
        check(config, _describe(config, forest, answers))
        return FilModel(config, forest, answers)


def _describe(config: ModelConfig, forest: Forest, answers: Answers) -> DescribedModel:
    """The output's width is the configuration's where there is a choice; SHAP values are there if it asks for them."""
    configured = {tensor.name: tuple(tensor.dims) for tensor in config.output}
    width = answers.width(2 if configured.get(OUTPUT, ())[-1:] == (2,) else 1)
    outputs = [DescribedTensor(OUTPUT, "FP32", (-1, width))]
    if SHAP in configured:
        if not forest.explains:
            raise ValueError(
                f"output '{SHAP}' of model '{config.name}' needs a model of type xgboost_json, xgboost_ubj or lightgbm"
            )
        of_each = (forest.features + 1,)
        outputs.append(
            DescribedTensor(SHAP, "FP32", (-1, *((answers.outputs,) if answers.outputs > 1 else ()), *of_each))
        )
    return DescribedModel((DescribedTensor(INPUT, "FP32", (-1, forest.features)),), tuple(outputs))


class FilModel(BackendModel):
    """All instances use one forest: the libraries compute in any number of threads at a time."""

    def __init__(self, config: ModelConfig, forest: Forest, answers: Answers) -> None:
        self.config = config
        self.forest = forest
        self.answers = answers

    def load_instance(self, context: InstanceContext) -> FilInstance:
        context.require_cpu("the fil backend computes on the CPU")
        return FilInstance(self)


class FilInstance(BackendInstance):
    def __init__(self, model: FilModel) -> None:
        self._forest = model.forest
        self._answers = model.answers
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in model.config.output}

    def execute(self, batch: Batch) -> None:
        rows = batch.gather()[INPUT]
        outputs = {}
        for name in self._shapes:
            if all(call.request.outputs and name not in call.request.outputs for call in batch.calls):
                continue
            if name == SHAP:
                values = self._forest.contributions(rows)
                outputs[name] = values if self._answers.outputs > 1 else values[:, 0]
            else:
                outputs[name] = self._answers.of(rows, self._shapes[name][-1])
        batch.scatter(outputs)

    def unload(self) -> None:
        del self._forest, self._answers
