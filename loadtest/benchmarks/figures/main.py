"""The pages of figures, rendered from `figures.toml` and `measured.json`, and the tables that are older than the code
they measure."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures.measure import MEASURED, Measured, ReadmeRow, keep, measure_row, measured
from penstock.loadtest.errors import LoadTestError

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).with_name("figures.toml")
PAGE = "docs/performance.md"
ROWS_PAGE = "docs/figures.md"
README = "README.md"
_MARKS = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    section: str
    title: str
    date: date
    machine: str
    """A name of `machines`."""
    code: tuple[str, ...]
    """Names of `paths`: what is measured."""
    method: str
    body: str
    """A table in Markdown."""
    command: str = ""
    note: str = ""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    head: str
    rows_head: str
    """Of the page with the README's rows."""
    readme_cpu: str
    """The class of CPU whose figures the README shows."""
    limitations: str
    machines: dict[str, str]
    paths: dict[str, tuple[str, ...]]
    readme: tuple[ReadmeRow, ...]
    table: tuple[Table, ...]


def main(settings: Mapping[str, Any]) -> int:
    """Exit status 1: with `check`, a page is not what the data says."""
    figures = read()
    if settings["measure"]:
        _measure(figures, settings["measure"], settings["dir"])
    for line in old_tables(figures):
        print(line)
    if settings["check"]:
        stale = [name for name, text in pages(figures).items() if (ROOT / name).read_text(encoding="utf-8") != text]
        for name in stale:
            print(f"{name} is not what {DATA.relative_to(ROOT)} says: python loadtest/benchmarks figures")
        return 1 if stale else 0
    for name, text in pages(figures).items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


def _measure(figures: Figures, names: Sequence[str], folder: str | None) -> None:
    """Each row is kept as soon as it is measured. Raises LoadTestError."""
    rows = {row.name: row for row in figures.readme}
    if unknown := [name for name in names if name not in rows]:
        raise LoadTestError(f"measure: {', '.join(unknown)} is none of {', '.join(rows)}")
    if folder is None:
        raise LoadTestError("--measure requires --dir FOLDER: where the peers are")
    for name in names:
        keep(name, measure_row(rows[name], folder))


def read(path: Path = DATA) -> Figures:
    """Raises LoadTestError."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Figures)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise LoadTestError(f"{path}: {error}") from None


def pages(figures: Figures) -> dict[str, str]:
    """Text by name; of the README only what is between its marks is from here."""
    readme = (ROOT / README).read_text(encoding="utf-8")
    table = "\n".join(_readme_table(figures))
    readme = _MARKS.sub(lambda marks: f"{marks[1]}{table}\n{marks[2]}", readme)
    return {PAGE: _page(figures), ROWS_PAGE: _rows_page(figures), README: readme}


def _readme_table(figures: Figures) -> Iterator[str]:
    results = measured()
    yield "| Penstock beside | ratio | measured |"
    yield "|---|---:|---|"
    for row in figures.readme:
        if not row.text:
            continue
        result = results.get(row.name, {}).get(figures.readme_cpu)
        if result is None:
            raise LoadTestError(f"{MEASURED}: {row.name}: not measured on {figures.readme_cpu}")
        yield f"| {row.text} | {result.figure} | {result.date}, {figures.readme_cpu} |"


def _page(figures: Figures) -> str:
    parts = [figures.head, "\n| machine | |\n|---|---|\n"]
    parts += [f"| {name} | {text} |\n" for name, text in figures.machines.items()]
    for section, tables in groupby(figures.table, key=lambda table: table.section):
        parts.append(f"\n## {section}\n")
        parts += [_section(table, figures.machines) for table in tables]
    return "".join([*parts, "\n", figures.limitations])


def _rows_page(figures: Figures) -> str:
    """Rows that were measured."""
    results = measured()
    rows = (_row(row, results[row.name]) for row in figures.readme if row.name in results)
    return figures.rows_head.lstrip() + "".join(rows)


def _row(row: ReadmeRow, results: Mapping[str, Measured]) -> str:
    """A method that several CPUs share stands once, with the first."""
    command = f"`python loadtest/benchmarks figures --measure {row.name} --dir peers`"
    lines, said = [f"\n## {row.title}"], ""
    for result in results.values():
        about = "; ".join(filter(None, (result.machine, result.versions)))
        head = [f"**{result.date}.**", *([] if said else [f"{command}."]), f"{about}."]
        head += [result.method] if result.method != said else ["As above."]
        lines += ["", " ".join(head).rstrip(), "", *result.body]
        said = result.method
    return "\n".join([*lines, ""])


def _section(table: Table, machines: Mapping[str, str]) -> str:
    if table.machine not in machines:
        raise LoadTestError(f"{DATA}: {table.title}: there is no machine {table.machine!r}")
    command = f" `{table.command}`." if table.command else ""
    note = f"\n{table.note}\n" if table.note else ""
    head = f"\n### {table.title}\n\n**{table.date}, {table.machine}.**{command} {table.method}\n\n"
    return head + table.body.strip() + "\n" + note


def old_tables(figures: Figures) -> Iterator[str]:
    """A line for each row and table that is older than the newest commit to what it measures."""
    results = measured()
    rows = [
        (f"{row.title} ({cpu})", row.code, date.fromisoformat(result.date))
        for row in figures.readme
        for cpu, result in results.get(row.name, {}).items()
    ]
    for title, code, day in [*rows, *((table.title, table.code, table.date) for table in figures.table)]:
        paths = [path for name in code for path in figures.paths[name]]
        if missing := [path for path in paths if not (ROOT / path).exists()]:
            raise LoadTestError(f"{DATA}: {title}: there is no {missing[0]}")
        changed = changed_on(paths)
        if changed > day:
            yield f"older than its code: {title} ({day}; changed {changed})"


def changed_on(paths: Sequence[str]) -> date:
    """The day of the newest commit to one of these. Raises LoadTestError outside of a git checkout."""
    command = ("git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", *paths)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise LoadTestError(f"git tells no dates: {done.stderr.strip() or 'no commits'}")
    return date.fromisoformat(done.stdout.strip())
