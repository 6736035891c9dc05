"""The command line: what a flag that there is not is answered with, units, and how settings are spelled."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.quantities import TimeUnit, duration_text, parse_duration, parse_size, size_text
from penstock.gateway import cli
from penstock.gateway.configuration.command_parser import CommandParser, as_flags, flags_in
from penstock.gateway.configuration.config import Config, ConfigError, load_config, sections
from penstock.gateway.configuration.flag_hints import FLAG_HINTS
from penstock.gateway.configuration.triton_flags import TRITON_SERVED


def parsers(parser: argparse.ArgumentParser) -> Iterator[CommandParser]:
    """With those of all commands below it, filled."""
    assert isinstance(parser, CommandParser)
    fill, parser._fill = parser._fill, None
    if fill is not None:
        fill(parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


ALL = {parser.prog: parser for parser in parsers(cli._parser())}
SERVE = ALL["penstock serve"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of an error of usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err.splitlines()


@pytest.mark.parametrize("command", ALL)
def test_a_flag_that_a_command_does_not_have_takes_two_lines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = refused(capsys, *command.split()[1:], "--no-such-flag", "SECRET")
    assert first == f"{command}: error: there is no flag --no-such-flag"
    assert second
    assert "SECRET" not in second


@pytest.mark.parametrize(
    "command",
    [
        name
        for name, parser in ALL.items()
        if name != "penstock" and any(each.required and not each.option_strings for each in parser._actions)
    ],
)
def test_what_is_missing_takes_two_lines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, *command.split()[1:])
    assert lines[0].startswith(f"{command}: error: ")
    assert len(lines) <= 2


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys)
    assert len(lines) <= 8
    assert lines[0].startswith("penstock serve MODEL")
    for line in lines[:5]:
        assert line.split()[1] in ALL["penstock"].commands


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("serve", "--modle", "x"), "the model is written without a flag: penstock serve MODEL"),
        (("serve", "--htp-port=1"), "did you mean --http-port?"),
        (("serve", "--max-num-seq", "4"), "write it in full: --max-num-seqs"),
        (("serve", "--max_num_seqs", "4"), "did you mean --max-num-seqs?"),
        (("serve", "--ctx-size", "4096"), "use --max-model-len"),
        (("serve", "-c", "4096"), "use --max-model-len"),
        (("serve", "-ngl", "99"), "the engine decides what runs on a GPU; --device cpu, cuda or cuda:1 chooses one"),
        (("serve", "--trust-remote-code"), "leave it out: code that comes with a model is never run"),
        (("sreve",), "did you mean penstock serve?"),
        (("loadtest", "--concurency", "4"), "did you mean --concurrency?"),
    ],
)
def test_a_wrong_flag_or_command_gets_a_hint(
    arguments: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *arguments)[1] == hint


def test_hints_name_flags_that_exist_and_are_for_flags_that_do_not() -> None:
    for flag, hint in FLAG_HINTS.items():
        assert set(flags_in(hint)) <= set(SERVE.flags), (flag, hint)
        assert flag not in SERVE.flags
        assert SERVE._hint(flag) == hint


@pytest.mark.parametrize(
    "flag", ["--model", "-m", "--n-gpu-layers", "--tensor-parallel", "--context-length", "--num-shard"]
)
def test_flags_of_other_servers_are_known(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = refused(capsys, "serve", flag, "1")
    assert first == f"penstock serve: error: there is no flag {flag}"
    assert second != SERVE._see_help


def test_only_flags_of_triton_s_may_be_abbreviated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_serve", lambda config, _: seen.append(config) or 0)
    assert cli.main(["serve", "--model-repo", "a", "--exit-timeout", "5"]) == 0
    assert seen[0].repository.model_repository == ("a",)
    assert seen[0].server.drain_timeout == 5
    for flag in sorted(set(SERVE.flags) - TRITON_SERVED)[::3]:  # the parser takes 10 ms for each
        short = flag[:-1]
        if short in SERVE.flags or not flag.startswith("--") or sum(f.startswith(short) for f in SERVE.flags) != 1:
            continue
        lines = refused(capsys, "serve", short, "1")
        assert lines[0] == f"penstock serve: error: there is no flag {short}"
        assert flag in lines[1] or FLAG_HINTS.get(short) == lines[1]


WORDS = {
    "N",
    "DURATION",
    "FILE",
    "NAME",
    "SIZE",
    "TEXT",
    "ADDR",
    "LIST",
    "MODEL",
    "JSON",
    "DIR",
    "URL",
    "DEVICE",
    "KEY",
}
WORDS |= {"PORT", "REGEX", "ID", "REV", "HEADER", "T", "REPO", "CONFIG", "API", "VALUE", "VALUES", "COUNT", "DATATYPE"}
WORDS |= {"SHAPE", "REPORT.json", "COMMAND"}


def test_help_names_what_a_flag_takes() -> None:
    for command, parser in ALL.items():
        for action in parser._actions:
            if action.nargs == 0 or action.choices or isinstance(action, argparse.BooleanOptionalAction):
                continue
            words = set(re.findall(r"[A-Za-z._]+", str(action.metavar)))
            assert words <= WORDS, f"{command}: {action.option_strings or action.dest} takes {action.metavar}"


# Units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("10gib", 10 << 30),
        ("4Gi", 4 << 30),
        ("1.5 MB", 1_500_000),
        ("4G", 4 * 10**9),
        ("7", 7),
        ("7B", 7),
        ("0.1kB", 100),
    ],
)
def test_sizes_are_bytes_with_or_without_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("30s", "s", 30),
        ("500ms", "s", 0.5),
        ("500ms", "ms", 500),
        ("1h30m", "s", 5400),
        ("1h 30m", "s", 5400),
        ("2d", "s", 172_800),
        ("1.5", "s", 1.5),
        ("20", "ms", 20),
        ("250us", "ms", 0.25),
    ],
)
def test_durations_become_numbers_of_the_setting_s_unit(text: str, unit: TimeUnit, number: float) -> None:
    assert parse_duration(text, unit) == number


@pytest.mark.parametrize("text", ["", "lots", "GiB", "-1GiB", "1XB", "1 2", "1e3GiB", "９GiB", "9" * 40 + "GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 10GiB, 500MB, or a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "soon", "s", "-5s", "5 parsecs", "5m3", "3:00"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not a duration such as 500ms, 30s, 5m, 1h30m, or a number of milliseconds"
    ):
        parse_duration(text, "ms")


@given(size=st.integers(0, 1 << 50))
def test_sizes_are_read_as_they_are_written(size: int) -> None:
    assert parse_size(size_text(size)) == size


@given(number=st.integers(0, 10**9), unit=st.sampled_from(["us", "ms", "s"]))
def test_durations_are_read_as_they_are_written(number: int, unit: TimeUnit) -> None:
    assert parse_duration(duration_text(number, unit), unit) == number


UNITS = {"data_size": ("10GiB", 10 << 30), "drain_timeout": ("1m30s", 90.0), "itl_target_ms": ("0.2s", 200.0)}
UNITS |= {"http_max_input_size": ("2MiB", 2 << 20), "grpc_keepalive_time": ("2h", 7_200_000)}


def values(config: Config) -> dict[str, object]:
    tree = {name: value for section in sections(config).values() for name, value in section.items()}
    return {name: tree[name] for name in UNITS}


def test_units_in_flags_variables_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: number for name, (_, number) in UNITS.items()}
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_serve", lambda config, _: seen.append(config) or 0)
    flags = [word for name, (text, _) in UNITS.items() for word in (f"--{name.replace('_', '-')}", text)]
    assert cli.main(["serve", *flags]) == 0
    assert values(seen[0]) == expected
    variables = {f"PENSTOCK_{name.upper()}": text for name, (text, _) in UNITS.items()}
    assert values(load_config({}, environ=variables)) == expected
    file = tmp_path / "penstock.toml"
    file.write_text("".join(f'{name} = "{text}"\n' for name, (text, _) in UNITS.items()))
    assert values(load_config({}, file=file, environ={})) == expected


def test_a_wrong_unit_names_flag_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = refused(capsys, "serve", "--data-size", "10GiBs")
    assert line == (
        "penstock serve: error: --data-size: '10GiBs' is not a size such as 10GiB, 500MB, or a number of bytes"
    )
    with pytest.raises(ConfigError, match="drain_timeout: 'soon' is not a duration such as"):
        load_config({}, environ={"PENSTOCK_DRAIN_TIMEOUT": "soon"})


# Spelling

NAMES = ("max_model_len", "kv_cache_memory", "dtype", "prefix_caching", "engine", "http_port")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_model_len=8192 is above the model's 2048", "--max-model-len 8192 is above the model's 2048"),
        ("http_port: cannot listen", "--http-port: cannot listen"),
        ("make it smaller (kv_cache_memory)", "make it smaller (--kv-cache-memory)"),
        ("prefix_caching=False does not go with it", "--no-prefix-caching does not go with it"),
        ("dtype=bf16 is not offered", "--dtype bf16 is not offered"),
        ("already --dtype bf16", "already --dtype bf16"),
        ("vllm,engine='llama' is none of these", "vllm,engine='llama' is none of these"),
        ("a/max_model_len=3 is a path", "a/max_model_len=3 is a path"),
        ("first\nmax_model_len=3", "first\nmax_model_len=3"),
        ("model: there is no file x", "there is no file x"),
    ],
)
def test_errors_spell_settings_as_flags(message: str, shown: str) -> None:
    assert as_flags(message, NAMES) == shown
