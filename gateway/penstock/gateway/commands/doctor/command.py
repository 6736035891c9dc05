"""The command line of `penstock doctor`. What looks at the machine is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engines.errors import PenstockError
from penstock.engines.host.machine_facts import versions
from penstock.gateway.commands.bench.options import SETTINGS
from penstock.gateway.configuration.config import SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.flags import add_sections

if TYPE_CHECKING:
    from penstock.gateway.commands.doctor.findings import DoctorReport

_OF_SERVER = ("http_port", "grpc_port", "metrics_port", "model_repository", "crash_dir")


def add_doctor_command(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine can serve",
        usage="penstock doctor [MODEL] [options]",
        description="Looks at the CPU, the memory and how fast it is read, GPUs, limits, ports, folders, engines and "
        "backends. With MODEL, says what it would need here, how fast it would be, and which weights to choose; "
        "without it, no model is examined. Ends with 1 if there is a problem.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    add_sections(parser, SECTIONS, positional="model", only=(*_OF_SERVER, *SETTINGS))
    parser.set_defaults(run_command=partial(_run, parser))


def _examine(config: Config) -> DoctorReport:
    """All checks, in the order of the page."""
    from penstock.gateway.commands.doctor.findings import DoctorReport, Section
    from penstock.gateway.commands.doctor.machine_checks import machine_findings, memory_speed
    from penstock.gateway.commands.doctor.model_advice import model_findings
    from penstock.gateway.commands.doctor.package_checks import backend_findings, engine_findings

    speed = memory_speed()
    sections = [
        Section("This machine", list(machine_findings(config, speed))),
        Section("Engines for language models", list(engine_findings())),
        Section("Backends for classic models", list(backend_findings())),
    ]
    if config.models.model.model is not None:
        sections.append(Section("The model", list(model_findings(config.models, speed))))
    return DoctorReport(versions=versions(), sections=sections)


def _run(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> int:
    as_json, file = settings.pop("json", False), settings.pop("config", None)
    try:
        config = load_config(settings, file=file)
        from penstock.gateway.commands.doctor.findings import page

        report = _examine(config)
    except ConfigError as error:
        parser.error(str(error))
    except (PenstockError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else page(report))
    return 1 if report.problems else 0
