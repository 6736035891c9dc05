"""The parameters that are varied (flags of a server, and fields of its models' configurations), and the strategies that
search their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from penstock.loadtest.errors import LoadTestError

FIELDS = ("instance_count", "max_batch_size", "max_queue_delay_microseconds")
Combination = Mapping[str, str]
"""A value for each parameter, by its name as it was written."""


class Param(NamedTuple):
    name: str
    values: list[str]

    @property
    def of_model(self) -> bool:
        return "." in self.name


def parse_params(texts: Sequence[str]) -> list[Param]:
    """From `max_num_seqs=16,32`. Raises LoadTestError."""
    if not texts:
        raise LoadTestError("--param is required, as in --param max_num_seqs=16,32,64")
    params = [_param(text) for text in texts]
    names = [param.name for param in params]
    if twice := {name for name in names if names.count(name) > 1}:
        raise LoadTestError(f"param: {', '.join(sorted(twice))} is given twice")
    return params


def _param(text: str) -> Param:
    written, equals, listed = text.partition("=")
    values = list(dict.fromkeys(value.strip() for value in listed.split(",")))
    model, dot, field = written.strip().rpartition(".")
    name = model + dot + field.replace("-", "_") if dot else written.strip().lstrip("-").replace("-", "_")
    if not equals or not name or "" in values:
        raise LoadTestError(f"param: {text!r} is not NAME=VALUE,VALUE as max_num_seqs=16,32")
    if dot and (not model or name.rpartition(".")[2] not in FIELDS):
        raise LoadTestError(f"param: {written!r} is not MODEL.FIELD; fields are {', '.join(FIELDS)}")
    if dot and not all(value.isdecimal() for value in values):
        raise LoadTestError(f"param: {text!r}: values of {written} are whole numbers")
    return Param(name, values)


def flags(combination: Combination) -> list[str]:
    """Those of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in combination.items() if "." not in name]


def of_models(combination: Combination) -> dict[str, dict[str, int]]:
    """Fields by model."""
    settings: dict[str, dict[str, int]] = {}
    for name, value in combination.items():
        model, dot, field = name.rpartition(".")
        if dot:
            settings.setdefault(model, {})[field] = int(value)
    return settings


def configured(config: Mapping[str, Any], fields: Mapping[str, int]) -> dict[str, Any]:
    """A model's configuration (as JSON has it) with these fields. Raises LoadTestError for what it cannot have."""
    changed = copy.deepcopy(dict(config))
    for field, value in fields.items():
        if field == "max_batch_size":
            changed["max_batch_size"] = value
        elif field == "instance_count":
            changed["instance_group"] = [{**group, "count": value} for group in changed.get("instance_group") or [{}]]
        else:
            if "sequence_batching" in changed:
                raise LoadTestError(f"param: {changed.get('name')} has a sequence batcher, and so no queue delay")
            changed["dynamic_batching"] = {**(changed.get("dynamic_batching") or {}), field: value}
    batching = changed.get("dynamic_batching")
    if batching and "max_batch_size" in fields:  # sizes above the new bound would be refused
        preferred = [size for size in batching.get("preferred_batch_size", ()) if int(size) <= fields["max_batch_size"]]
        changed["dynamic_batching"] = {**batching, "preferred_batch_size": preferred}
    return changed


def config_lines(fields: Mapping[str, int]) -> list[str]:
    """What to write into the model's config.pbtxt."""
    forms = {
        "instance_count": "instance_group [ { count: %d } ]",
        "max_batch_size": "max_batch_size: %d",
        "max_queue_delay_microseconds": "dynamic_batching { max_queue_delay_microseconds: %d }",
    }
    return [forms[field] % value for field, value in fields.items()]


Score = tuple[float, ...]
"""More is better, compared from the left."""
Evaluate = Callable[[Combination], Score]


def exhaustive(params: Sequence[Param], evaluate: Evaluate) -> None:
    """All of them."""
    for values in product(*(param.values for param in params)):
        evaluate(dict(zip((param.name for param in params), values, strict=True)))


def quick(params: Sequence[Param], evaluate: Evaluate) -> None:
    """Coordinate ascent: from the first values on, the best value of one parameter after the other, with the others as
    they are, until a whole round changes nothing. Finds the best of all where parameters do not depend on each other,
    else one that no single change makes better. Nothing is tried twice."""
    known: dict[tuple[str, ...], Score] = {}

    def score(combination: Combination) -> Score:
        key = tuple(combination.values())
        if key not in known:
            known[key] = evaluate(combination)
        return known[key]

    best = {param.name: param.values[0] for param in params}
    score(best)
    while True:
        before = dict(best)
        for param in params:
            ways = [best, *({**best, param.name: value} for value in param.values)]
            best = max(ways, key=score)  # the first of equals: what it was
        if best == before:
            return


STRATEGIES = {"exhaustive": exhaustive, "quick": quick}
