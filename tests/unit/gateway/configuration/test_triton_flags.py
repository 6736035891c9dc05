"""Triton's flags as start scripts have them: abbreviated, in capitals, deprecated, or without a meaning here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.gateway import cli
from penstock.gateway.configuration.config import Config, ConfigError, load_config
from penstock.gateway.configuration.triton_flags import (
    TRITON_OLD,
    TRITON_REFUSED,
    TRITON_SERVED,
    TRITON_TUNING,
)
from penstock.gateway.metrics.triton import TritonMetrics
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.server_log import log_to_file
from penstock.gateway.server.composition.ports import build_tracing, grpc_settings
from penstock.gateway.server.served_models import ServedModels

Serve = Callable[..., tuple[Config, str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Serve:
    """The configuration that a command has, and what it prints on standard error."""
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_serve", lambda config, _: seen.append(config) or 0)

    def run(*flags: str) -> tuple[Config, str]:
        assert cli.main(["serve", *flags]) == 0
        return seen[-1], capsys.readouterr().err

    return run


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *flags])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", sorted(TRITON_TUNING))
def test_flags_that_only_tune_are_warned_about(serve: Serve, flag: str) -> None:
    config, told = serve(f"{flag}=0:67108864", flag, "1:64", "--http-port=81")
    assert config == load_config({"http_port": 81})
    assert told == f"penstock serve: warning: {flag} has no effect: {TRITON_TUNING[flag]}\n"


def test_no_flag_about_access_tls_or_limits_is_passed_over() -> None:
    words = ("limit", "restricted", "ssl", "cert", "key", "max-input", "policy", "capability", "allow")
    assert not [flag for flag in TRITON_TUNING if any(word in flag for word in words)]
    kinds = (TRITON_TUNING.keys(), TRITON_OLD.keys(), TRITON_REFUSED.keys(), TRITON_SERVED)
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))


@pytest.mark.parametrize(
    "flag", ["--reuse-grpc-port", "--model-namespacing", "--allow-sagemaker", "--allow-vertex-ai", "--reuse-http-port"]
)
def test_what_is_refused(serve: Serve, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "is a flag of Triton's that this server does not have" in refused(capsys, f"{flag}=True")
    assert "is a flag of Triton's that this server does not have" in refused(capsys, "--model-load-gpu-limit=0:0.5")
    assert serve(f"{flag}=FALSE", flag, "0") == (load_config({}), "")


def test_older_names_are_obeyed(serve: Serve) -> None:
    config, told = serve(
        *("--trace-file=/t.json", "--trace-level=MAX", "--trace-rate", "5", "--trace-count=7"),
        *("--trace-log-frequency=3", "--strict-model-config=true"),
    )
    settings = build_tracing(config.server.trace_config).settings("")
    assert settings["trace_level"] == ["TIMESTAMPS"]
    assert (settings["trace_rate"], settings["trace_count"], settings["log_frequency"]) == ("5", "7", "3")
    assert settings["trace_file"] == "/t.json"
    assert config.repository.disable_auto_complete_config
    assert told.count("\n") == 6
    assert "--trace-rate is an older name of Triton's own: use --trace-config=rate=5\n" in told
    assert not serve("--strict-model-config", "false")[0].repository.disable_auto_complete_config


def test_a_flag_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trace-file: expected one argument" in refused(capsys, "--trace-file")
    for flag in ("--enable-peer-access", "--strict-model-config", "--allow-vertex-ai"):
        assert f"{flag}: expected one argument" in refused(capsys, flag, "--http-restricted-api=health:key=value")


def test_names_may_be_abbreviated(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    config, told = serve("--log-warn=false", "--strict-model=1", "--cuda-memory-p=0:1", "--grpc-root", "/ca.pem")
    assert not config.server.log_warning
    assert config.repository.disable_auto_complete_config
    assert config.grpc.grpc_root_cert == "/ca.pem"
    assert "--cuda-memory-pool-byte-size has no effect" in told
    for short, candidates in {
        "--trace-l=x": "--trace-level or --trace-log-frequency",
        "--grpc-use=true": "--grpc-use-ssl or --grpc-use-ssl-mutual",
        "--exit": "--exit-on-error or --exit-timeout-secs",
    }.items():
        assert refused(capsys, short).endswith(f"write it in full: {candidates}\n")


def test_values_are_taken_in_any_case(serve: Serve) -> None:
    config, _ = serve(
        "--model-control-mode=EXPLICIT", "--rate-limit=Execution_Count", "--log-format=iso8601", "--exit-on-error=False"
    )
    assert config.repository.model_control_mode == "explicit"
    assert build_tracing(("level=Tensors", "mode=TRITON")).settings("")["trace_level"] == ["TENSORS"]
    assert config.repository.rate_limit == "execution_count"
    assert config.server.log_format == "ISO8601"
    assert not config.repository.exit_on_error
    assert load_config({}, environ={"PENSTOCK_MODEL_CONTROL_MODE": "Poll"}).repository.model_control_mode == "poll"
    with pytest.raises(ConfigError, match="'EXPLIZIT' is not one of"):
        load_config({"model_control_mode": "EXPLIZIT"})


def test_the_log_goes_to_a_file(tmp_path: Path) -> None:
    path, kept = tmp_path / "log", os.dup(2)
    path.write_text("before\n")
    try:
        log_to_file(str(path))
        os.write(2, b"after\n")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert path.read_text() == "before\nafter\n"


def test_a_log_file_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", f"--log-file={tmp_path}"]) == 1
    assert capsys.readouterr().err == f"penstock serve: error: --log-file {tmp_path}: Is a directory\n"


def test_metrics_of_machines_can_be_left_out() -> None:
    def names(machine: bool) -> set[str]:
        return {family.name for family in TritonMetrics(list, dict, machine=machine).families()}

    assert names(True) - names(False) == {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"}


def test_a_pattern_that_no_metadata_can_match_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"grpc_header_forward_pattern": "(?-i)MY_HEADER.*"})
    for _ in range(2):
        assert grpc_settings(config).header_forward_pattern is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "never matches" in caplog.text
    with pytest.raises(ConfigError, match="regular expression"):
        grpc_settings(load_config({"grpc_header_forward_pattern": "("}))


def served(**settings: object) -> ServedModels:
    return ServedModels(load_config(settings, environ={}), WorkPools(), LoadingBoard())


async def test_a_folder_counts_once_whatever_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "m/1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    names = (folder, f"{folder}/", f"{folder}/../models", tmp_path / "link", f"file://{folder}")
    repository = served(model_repository=[*map(str, names)], model_control_mode="explicit").repository
    await repository.start()
    try:
        assert [(entry.name, entry.reason) for entry in repository.index(ready=False)] == [("m", "")]
    finally:
        await repository.stop()


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
@pytest.mark.parametrize("strict", [True, False])
async def test_a_repository_that_is_not_there(tmp_path: Path, mode: str, strict: bool) -> None:
    good, missing = tmp_path / "good", str(tmp_path / "missing")
    good.mkdir()
    settings = {"model_repository": [missing, str(good)], "model_control_mode": mode, "strict_readiness": strict}
    with pytest.raises(ConfigError, match=f"model-repository: the model repository {missing} cannot be read"):
        served(**settings)
    models = served(**settings, exit_on_error=False)
    await models.repository.start()
    try:
        assert models.is_live()
        assert models.ready is not strict
    finally:
        await models.repository.stop()
    with pytest.raises(ConfigError, match="names no bucket"):
        served(model_repository=["s3://"], exit_on_error=False)
