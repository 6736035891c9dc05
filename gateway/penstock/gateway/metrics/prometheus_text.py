"""Prometheus text for families whose names are given from outside: Triton's, and those of models.

prometheus-client would add `_total` to the names of counters, which the dashboards of Triton's users do not know.
Format: Prometheus exposition text 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary"]


@dataclass(slots=True)
class Family:
    name: str
    kind: Kind
    text: str
    samples: list[tuple[str, Mapping[str, str], float]] = field(default_factory=list)
    """(suffix of the name, labels, value)."""

    def add(self, labels: Mapping[str, str], value: float, suffix: str = "") -> None:
        self.samples.append((suffix, labels, value))


def render(families: Iterable[Family]) -> bytes:
    lines: list[str] = []
    for family in families:
        text = family.text.replace("\\", r"\\").replace("\n", r"\n")
        lines += (f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}")
        lines += (
            f"{family.name}{suffix}{_labels(labels)} {_number(value)}" for suffix, labels, value in family.samples
        )
    return "".join(f"{line}\n" for line in lines).encode()


def _number(value: float) -> str:
    return "NaN" if value != value else repr(value)


def _labels(labels: Mapping[str, str]) -> str:
    """In the order in which Triton has them: scripts look for whole lines."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items(), key=_order)) + "}"


def _order(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in ("le", "quantile"), label[0]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
