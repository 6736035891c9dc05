"""docs/model_repository.md says of every field what the table says."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.gateway.models.repository.config_fields import FIELDS

TEXT = (Path(__file__).parents[5] / "docs" / "model_repository.md").read_text(encoding="utf-8")


def test_every_field_is_explained_with_its_fate() -> None:
    section = TEXT.partition("## Fields of config.pbtxt")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    said = {path: fate.strip() for paths, fate in rows for path in re.findall(r"`([^`]+)`", paths)}
    assert said == {path: treatment.fate.value for path, treatment in FIELDS.items()}


def test_fields_of_one_backend_are_explained_as_such() -> None:
    for line in TEXT.splitlines():
        for path in re.findall(r"`([a-z_.]+)`", line.split("|")[1]) if line.startswith("| `") else []:
            only = FIELDS[path].only if path in FIELDS else frozenset()
            if only:
                names = "`, `".join(sorted(only))
                assert f"| for `{names}` and third-party backends, else refused" in line, path
