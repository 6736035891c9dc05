"""Which argument of a model each configured input is, and which of its results each output.

The conventions of Triton's PyTorch backend: names of arguments, `<anything>__<index>`, a dictionary, or else the order
of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.errors import EngineError

_INDEXED = re.compile(r".+__(\d{1,4})", re.ASCII)

DICTIONARY = "Dict[str, Tensor]"
STRINGS = "List[str]"


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    type: str
    """`Tensor`, DICTIONARY, STRINGS, or another that no request can carry."""
    optional: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class InputBinding:
    order: tuple[str | None, ...]
    """Of each argument, the input that it takes; None: its default."""
    arguments: Sequence[Argument]
    dictionary: bool = False
    """All inputs are one argument, by their names."""

    def values(self, feed: Mapping[str, Any]) -> list[Any]:
        """The arguments of one execution, by position. `feed` lacks no input but optional ones."""
        if self.dictionary:
            return [dict(feed)]
        return [
            argument.default if name is None else feed.get(name, argument.default)
            for name, argument in zip(self.order, self.arguments, strict=True)
        ]


def bind_inputs(names: Sequence[str], optional: Sequence[str], arguments: Sequence[Argument]) -> InputBinding:
    """`optional`: those of the names that a request may leave out. Raises ValueError when they do not fit."""
    if len(arguments) == 1 and arguments[0].type == DICTIONARY:
        return InputBinding((), arguments, dictionary=True)
    by_name = {argument.name: index for index, argument in enumerate(arguments)}
    if all(name in by_name for name in names):
        places = {by_name[name]: name for name in names}
    elif (indices := _indices(names)) is not None:
        places = dict(zip(indices, names, strict=True))
    else:
        places = dict(enumerate(names))
    if (extra := max(places, default=0)) >= max(1, len(arguments)):
        raise ValueError(
            f"input '{places[extra]}' would be argument {extra} of forward(), which has {len(arguments)}: name inputs"
            f" as its arguments ({', '.join(by_name) or 'none'}), or <name>__<index>"
        )
    for index, argument in enumerate(arguments):
        name = places.get(index)
        if name is None and not argument.optional:
            raise ValueError(f"argument '{argument.name}' of forward() has no input in the configuration")
        if name is not None and name in optional and not argument.optional:
            raise ValueError(f"input '{name}' is optional, and argument '{argument.name}' of forward() is not")
        if name is not None and argument.type not in ("Tensor", STRINGS):
            raise ValueError(f"argument '{argument.name}' of forward() is a {argument.type}, which no input can be")
    return InputBinding(tuple(places.get(index) for index in range(len(arguments))), arguments)


def bind_outputs(names: Sequence[str]) -> dict[str, int]:
    """The place of each output in a tuple of results. A dictionary of results is read by name instead."""
    indices = _indices(names)
    return dict(zip(names, range(len(names)) if indices is None else indices, strict=True))


def results(found: Any, places: Mapping[str, int]) -> dict[str, Any]:
    """What a model gave, by output. Raises EngineError when it is too little."""
    if isinstance(found, Mapping):
        if missing := sorted(places.keys() - found.keys()):
            raise EngineError(f"the model gave no output '{missing[0]}', but {', '.join(map(str, found))}"[:400])
        return {name: found[name] for name in places}
    is_strings = isinstance(found, list) and all(isinstance(item, str) for item in found)
    values = found if isinstance(found, tuple | list) and not is_strings else (found,)
    if (most := max(places.values(), default=0)) >= len(values):
        raise EngineError(f"the model gave {len(values)} outputs, and the configuration names output {most}")
    return {name: values[index] for name, index in places.items()}


def _indices(names: Sequence[str]) -> list[int] | None:
    """Of names that all end in `__<index>`, each with another one."""
    found = [int(match.group(1)) for name in names if (match := _INDEXED.fullmatch(name))]
    return found if len(found) == len(names) == len(set(found)) else None
