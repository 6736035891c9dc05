"""The command line. `penstock serve` stands here; other commands come as entry points of the group `penstock.commands`.

Flags are derived from the structs of settings (`penstock.gateway.configuration.flags`); nothing else happens here.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.engines import __version__
from penstock.engines.process.worker_process import end_unused, start_early
from penstock.gateway.commands.bench import add_bench_command
from penstock.gateway.commands.doctor import add_doctor_command
from penstock.gateway.commands.terminal_chat import add_chat_command
from penstock.gateway.commands.top import add_top_command
from penstock.gateway.commands.verify import add_verify_command
from penstock.gateway.configuration.command_parser import CommandParser
from penstock.gateway.configuration.config import LISTS, OTHER_NAMES, SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.flag_hints import FLAG_HINTS
from penstock.gateway.configuration.flags import add_sections, switches
from penstock.gateway.configuration.likely_engine import likely_engine
from penstock.gateway.configuration.triton_flags import without_triton_forms
from penstock.gateway.models.language.hub_command import add_hub_commands
from penstock.gateway.models.repository.checking import add_check_command
from penstock.gateway.ray_serve.deploy_command import add_deploy_command
from penstock.gateway.requests.key_command import add_key_command
from penstock.gateway.requests.service_manager import VARIABLES
from penstock.gateway.server.debug_bundle import add_debug_command

if TYPE_CHECKING:
    from penstock.gateway.models.repository.checking import Verdict

_CLOSED_PIPE = 141
"""The exit status of a program that SIGPIPE ends, as shells show it."""
_INTERRUPTED = 130
"""By Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    _check_package()
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.exit(2, _OVERVIEW)
    if arguments[0] not in parser.commands and ("/" in arguments[0] or Path(arguments[0]).exists()):
        parser.fail(f"there is no command {arguments[0]!r}", f"to serve it as a model: penstock serve {arguments[0]}")
    args = vars(parser.parse_args(arguments))
    run: Callable[[dict[str, Any]], int] = args.pop("run_command")
    try:
        status = run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `penstock chat | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return _CLOSED_PIPE
    except KeyboardInterrupt:  # of commands, and parts of them, that do not handle it themselves
        return _INTERRUPTED
    return status


def _check_package() -> None:
    """Warns if another distribution has replaced this one's `penstock/__init__.py`. The one that PyPI has as `penstock`
    would."""
    if "LLM" not in getattr(penstock, "__all__", ()):
        print(
            f"penstock: {penstock.__file__} belongs to another distribution, so `from penstock import LLM` fails: "
            "pip uninstall penstock && pip install --force-reinstall --no-deps penstock-server",
            file=sys.stderr,
        )


def _configured(
    parser: argparse.ArgumentParser, settings: dict[str, Any], answer: tuple[Path, Path] | None = None
) -> int:
    file = settings.pop("config", None)
    try:
        config = load_config(settings, file=file)
    except ConfigError as error:
        parser.error(str(error))
    return _serve(config, answer)


def _serve(config: Config, answer: tuple[Path, Path] | None) -> int:
    # Engine processes are started by fork and exec; gRPC's fork handlers only cost there, and complain. It reads this
    # when it is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if config.server.log_file and not _log_to(config.server.log_file):
        return 1
    engine = likely_engine(config)
    if engine is not None:
        start_early(engine, without=VARIABLES)
    gc.disable()  # modules stay: looking through what they have made so far takes a tenth of the time to import them
    try:
        from penstock.gateway.server.lifecycle import answer_file, serve

        gc.enable()
        return serve(config) if answer is None else answer_file(config, *answer)
    finally:
        end_unused()


def _log_to(path: str) -> bool:
    from penstock.gateway.requests.server_log import log_to_file

    try:
        log_to_file(path)
    except OSError as error:
        print(f"penstock serve: error: --log-file {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _check(config: Config, gpus: int | None) -> Sequence[Verdict]:
    from penstock.gateway.server.composition.models import check_models

    return check_models(config, gpus)


_COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("run", "start", "server", "launch"), "use penstock serve MODEL, and penstock chat to talk to it"),
    **dict.fromkeys(("ls", "ps", "models"), "use penstock list"),
    **dict.fromkeys(("remove", "delete"), "use penstock rm"),
    "download": "use penstock pull",
}
"""Commands of other programs for the same thing."""
_OVERVIEW = """\
penstock serve MODEL          serve a model: a folder, a GGUF file, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct
penstock chat                 talk to it in this terminal
penstock pull ID              download a model of the hub
penstock loadtest --url URL   measure a server
penstock check REPO           say which models of a Triton repository would serve

`penstock --help` shows all commands, `penstock COMMAND --help` the flags of one.
"""
"""What there is to see without a command."""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock",
        description="Serves language models with continuous batching, and Triton model repositories beside them, over "
        "the OpenAI API and KServe v2.",
        hints=_COMMANDS_ELSEWHERE,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        prepare=partial(without_triton_forms, switches(SECTIONS)),
        hints=FLAG_HINTS,
        **_SERVE,
    )
    serve.set_defaults(run_command=partial(_configured, serve))
    _add_settings(serve)
    _add_run_batch(commands)
    add_key_command(commands)
    add_chat_command(commands, _FORMATTER)
    add_hub_commands(commands, _FORMATTER)
    add_bench_command(commands, _FORMATTER)
    add_verify_command(commands, _FORMATTER)
    add_doctor_command(commands, _FORMATTER)
    add_check_command(commands, _FORMATTER, _check)
    add_deploy_command(commands, _FORMATTER)
    add_top_command(commands, _FORMATTER)
    add_debug_command(commands, _FORMATTER)
    for command in entry_points(group="penstock.commands"):
        command.load()(commands, add_sections, _FORMATTER)
    return parser


def _add_run_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        description="Answers the requests in a file, in the form of OpenAI's batches, without opening ports. Started "
        "again after an interruption, it continues.",
        argument_default=argparse.SUPPRESS,
        formatter_class=_FORMATTER,
        hints=FLAG_HINTS,
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one in a line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="where results go")
    parser.add_argument("--model", metavar="MODEL", help="the model, as in vLLM; or without a flag")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    sections = {name: SECTIONS[name] for name in _OF_MODELS}
    settings = [field for section in sections.values() for field in section.__struct_fields__]
    settings += ["batch_lines_in_flight", "memory_limit", "log_level"]
    add_sections(parser, SECTIONS, positional="model", lists=LISTS, other_names=OTHER_NAMES, only=settings)
    parser.set_defaults(run_command=partial(_run_batch, parser))


_OF_MODELS = ("model", "engine", "door", "adapters", "embeddings", "cache", "scheduling", "simulated")
"""Sections that say nothing of ports."""


def _run_batch(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> int:
    source, target = settings.pop("input_file"), settings.pop("output_file")
    return _configured(parser, settings, answer=(source, target))


_FORMATTER = partial(argparse.HelpFormatter, max_help_position=34, width=110)
_SERVE: dict[str, Any] = {
    "usage": "penstock serve [MODEL] [options]",
    "description": "Serves MODEL and the models of --model-repository; without either, the built-in demo model.",
    "epilog": "Each setting can also be set in the file given by --config (TOML or YAML), or in a variable named "
    "PENSTOCK_ and the flag's name in capitals, as in PENSTOCK_HTTP_PORT. Flags win over variables, those over "
    "the file. SIZE is like 10GiB, 500MB, or a number of bytes; DURATION like 500ms, 30s, 1h30m, or a number in the "
    "unit that the flag's text names.",
    "argument_default": argparse.SUPPRESS,
    "formatter_class": _FORMATTER,
    "add_help": False,
}
_MOST_NEEDED = (
    *("model", "served_model_name", "engine", "device", "max_model_len", "weights", "chat_template"),
    *("kv_cache_memory", "max_num_seqs", "request_timeout"),
    *("model_repository", "model_control_mode", "load_model"),
    *("host", "http_port", "grpc_port", "metrics_port", "api_key", "memory_limit", "log_level"),
)
"""Settings that the short help shows."""


def _add_settings(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    parser.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="show the flags that are needed most")
    parser.add_argument("--help-all", action="help", help="show all flags")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    add_sections(parser, SECTIONS, positional="model", lists=LISTS, other_names=OTHER_NAMES, only=only)


class _ShortHelp(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        short = argparse.ArgumentParser(**_SERVE)
        short.epilog = f"These are the flags that are needed most; --help-all shows all. {short.epilog}"
        _add_settings(short, _MOST_NEEDED)
        short.print_help()
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
