"""`penstock check`: says of each model of a repository whether it would serve, and ends with a status for CI."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engines.errors import PenstockError
from penstock.gateway.configuration.config import LISTS, SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.flags import add_sections

if TYPE_CHECKING:  # numpy comes with it, and --help should be quick
    from penstock.gateway.repository.checking import Result, Verdict

CheckModels = Callable[[Config, int | None], "Sequence[Verdict]"]
"""Of a server with these settings, on a machine with so many GPUs (None: those that are there). Raises ConfigError,
PenstockError."""

_RESULTS: tuple[Result, ...] = ("works", "works differently", "refused")

_SETTINGS = (
    *("repository_links", "model_config_name", "disable_auto_complete_config", "backend_directory", "backend_config"),
    *("cache_config", "response_cache_byte_size", "rate_limit", "rate_limit_resource", "embedding_model"),
)


def add_check_command(commands: Any, formatter: Any, check: CheckModels) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser(
        "check",
        help="report which models of a repository would load",
        description="Reads the configurations of a Triton model repository, and what their backends complete of them, "
        "without loading a model. Ends with 1 if a model would be refused, with 2 if the repository cannot be read.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.add_argument("model_repository", nargs="+", metavar="REPO", help="folder, s3://, gs:// or as:// location")
    parser.add_argument("--gpus", type=int, metavar="N", help="as on a machine with N GPUs (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    add_sections(parser, SECTIONS, lists=LISTS, only=_SETTINGS)
    parser.set_defaults(run_command=lambda settings: _run(parser, settings, check))


def _run(parser: argparse.ArgumentParser, settings: dict[str, Any], check: CheckModels) -> int:
    gpus, as_json = settings.pop("gpus", None), settings.pop("json", False)
    try:
        verdicts = check(load_config(settings, environ={}), gpus)
    except (ConfigError, PenstockError) as error:
        parser.error(str(error))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(verdicts)).decode())
    else:
        print("\n".join(_lines(verdicts)))
    return 1 if any(verdict.result == "refused" for verdict in verdicts) else 0


def _lines(verdicts: Sequence[Verdict]) -> Iterable[str]:
    width = max((len(verdict.model) for verdict in verdicts), default=0)
    for verdict in verdicts:
        yield f"{verdict.model:{width}}  {verdict.result}"
        yield from (f"{'':{width}}    {note.where}: {note.text}" for note in verdict.notes)
    counts = Counter(verdict.result for verdict in verdicts)
    noun = "model" if len(verdicts) == 1 else "models"
    yield f"{len(verdicts)} {noun}: " + ", ".join(_counted(counts[result], result) for result in _RESULTS)


def _counted(number: int, result: Result) -> str:
    return f"{number} {result if number == 1 else result.replace('works', 'work')}"
