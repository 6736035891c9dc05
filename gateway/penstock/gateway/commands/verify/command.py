"""The command line of `penstock verify`. What checks is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engines.errors import PenstockError
from penstock.gateway.commands.bench.options import SETTINGS
from penstock.gateway.configuration.config import SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.flags import add_sections

if TYPE_CHECKING:  # numpy comes with it, and --help stays quick
    from penstock.gateway.commands.verify.verifying import Check

_SETTINGS = (
    *SETTINGS,
    *("chat_template", "chat_template_content_format", "special_tokens_in_content", "tool_parser", "reasoning_parser"),
    *("speculative", "speculative_model", "max_draft_tokens", "scheduler", "max_num_seqs", "log_level"),
)


def add_verify_command(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser(
        "verify",
        help="check that a model works here",
        usage="penstock verify [MODEL] [options]",
        description="Loads MODEL, by default the demo model, and checks its chat template, end tokens, tokenizer, "
        "numbers, answers, tool calls and JSON. Ends with 1 if a check fails or the model does not load.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts, no speed, nothing beside transformers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")
    parser.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME]",
        help="also run these tasks of lm-evaluation-harness (pip install lm_eval)",
    )
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="further tasks, in its YAML")
    parser.add_argument("--task-limit", type=int, metavar="N", help="only the first N documents of each task")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    add_sections(parser, SECTIONS, positional="model", only=_SETTINGS)
    parser.set_defaults(run_command=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, arguments: dict[str, Any]) -> int:
    quick, as_json = arguments.pop("quick", False), arguments.pop("json", False)
    of_tasks = {name: arguments.pop(name, None) for name in ("tasks", "task_folder", "task_limit")}
    progress = _Progress()
    try:
        tasks = _tasks(parser, **of_tasks)
        config = _config(parser, arguments)
        from penstock.gateway.commands.verify.verifying import page, verify

        report = verify(config, quick=quick, progress=progress, tasks=tasks)
    except (ConfigError, PenstockError, OSError) as error:
        progress("")
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    progress("")
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else page(report))
    return 1 if report.failed else 0


def _config(parser: argparse.ArgumentParser, arguments: dict[str, Any]) -> Config:
    file = arguments.pop("config", None)
    try:
        config = load_config(arguments, file=file)
    except ConfigError as error:
        parser.error(str(error))
    if config.models.model.engine == "simulated":
        parser.error("--engine simulated makes tokens up: there is nothing to verify")
    return config


def _tasks(
    parser: argparse.ArgumentParser, tasks: list[str] | None, task_folder: Path | None, task_limit: int | None
) -> Check | None:
    if tasks is None:
        if task_folder is not None or task_limit is not None:
            parser.error("--task-folder and --task-limit say more about --tasks")
        return None
    if task_limit is not None and task_limit < 1:
        parser.error("--task-limit must be at least 1")
    if find_spec("lm_eval") is None:
        parser.error("--tasks needs lm-evaluation-harness, which is not installed: pip install lm_eval")
    from penstock.gateway.commands.verify.tasks import Tasks

    return Tasks(tasks, task_folder, task_limit).check


class _Progress:
    """A line on a terminal that says which check runs."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{what}" + (" ..." if what else ""), end="", file=sys.stderr, flush=True)
