"""The order of the checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.gateway.commands.bench.figures import this_machine
from penstock.gateway.commands.verify.answer_checks import check_answers, check_json, check_tools
from penstock.gateway.commands.verify.number_checks import check_divergence, check_losses, check_speed, check_tokens
from penstock.gateway.commands.verify.report import Row, VerifyReport, page
from penstock.gateway.commands.verify.subject import Subject, options_of
from penstock.gateway.commands.verify.text_checks import check_end_tokens, check_template, check_tokenizer
from penstock.gateway.configuration.config import Config, ConfigError

__all__ = ["page", "verify"]

_ORDER = (
    *("chat template", "end tokens", "answers", "tokenizer", "greedy tokens", "text", "tool calls", "JSON"),
    *("numeric types", "speed", "tasks"),
)
"""Of the rows on the page."""

Progress = Callable[[str], None]
Check = Callable[[Subject], Row]


def verify(config: Config, *, quick: bool, progress: Progress, tasks: Check | None = None) -> VerifyReport:
    """`progress` is told the name of each check that begins; `tasks` are those of lm-evaluation-harness.

    Raises ConfigError, PenstockError: the model does not load.
    """
    machine, started = this_machine(), time.monotonic()
    run, slow = partial(_row, progress), partial(_skipped if quick else _row, progress)
    progress("loading")
    with Subject(config) as subject:
        name, info = subject.name, subject.info
        rows = [
            run("chat template", partial(check_template, subject)),
            run("end tokens", partial(check_end_tokens, subject)),
            run("tokenizer", partial(check_tokenizer, subject)),
            run("answers", partial(check_answers, subject, quick=quick)),
            run("text", partial(check_losses, subject)),
            run("tool calls", partial(check_tools, subject, quick=quick)),
            run("JSON", partial(check_json, subject, quick=quick)),
        ]
        if tasks is not None:
            rows.append(run("tasks", partial(tasks, subject)))
    # These load the model again, with other settings or in this process.
    rows.append(run("numeric types", partial(check_divergence, config, quick=quick)))
    rows.append(slow("greedy tokens", partial(check_tokens, config)))
    rows.append(slow("speed", partial(check_speed, config, info.context_length)))
    return VerifyReport(
        machine=machine,
        model=name,
        runner=info.runner,
        settings=options_of(config),
        rows=sorted(rows, key=lambda row: _ORDER.index(row.check)),
        seconds=time.monotonic() - started,
    )


def _row(progress: Progress, name: str, check: Callable[[], Row]) -> Row:
    progress(name)
    try:
        return check()
    except UnsupportedError as error:
        return Row(name, "skipped", str(error))
    except (PenstockError, ConfigError) as error:
        return Row(name, "FAIL", str(error))
    except Exception as error:  # a report without the other rows would say less
        return Row(name, "FAIL", f"the check itself failed: {type(error).__name__}: {error}")


def _skipped(progress: Progress, name: str, check: Callable[[], Row]) -> Row:
    return Row(name, "skipped", "left out by --quick")
