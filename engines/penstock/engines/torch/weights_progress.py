"""How many weights transformers has loaded, as told to the bar that it would draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from penstock.engines.contract.loading import Loading, Report

_STAGE = "weights"


@contextmanager
def weights_reported(report: Report) -> Iterator[None]:
    """While transformers loads a model. Where a version has no hook for its bars, only the stage is reported."""
    report(Loading(_STAGE))
    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        bar = factory(*args, **options)
        counts_weights = args and hasattr(args[0], "__len__") and _STAGE in str(options.get("desc"))
        return _CountedBar(bar, len(args[0]), report) if counts_weights else bar

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


class _CountedBar:
    """A bar that reports each item that is done; all else is the bar's own."""

    def __init__(self, bar: Any, total: int, report: Report) -> None:
        self._bar = bar
        self._total = total
        self._report = report

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._bar, 1):
            yield item
            self._report(Loading(_STAGE, number, self._total, "tensors"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
