"""The configuration tree: where settings come from, which wins, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.gateway import cli
from penstock.gateway.configuration.config import SECTIONS, Config, ConfigError, load_config
from penstock.gateway.configuration.sections.other_models import RepositoryConfig
from penstock.gateway.configuration.triton_flags import TRITON_REFUSED
from penstock.gateway.server.composition.models import repository_settings


def load(flags=None, file=None, environ=None) -> Config:
    return load_config(flags or {}, file=file, environ=environ or {})


def test_by_default_three_ports_are_local_and_no_model_is_named():
    config = load()
    assert config.server.host == "127.0.0.1"
    assert (config.server.http_port, config.server.grpc_port, config.server.metrics_port) == (8000, 8001, 8002)
    assert config.models.model.model is None


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text('[server]\nhttp_port = 1\ngrpc-port = 1\nmetrics_port = 1\n\n[model]\nengine = "simulated"\n')
    environ = {"PENSTOCK_HTTP_PORT": "2", "PENSTOCK_GRPC_PORT": "2"}
    config = load({"http_port": "3"}, file, environ)
    assert (config.server.http_port, config.server.grpc_port, config.server.metrics_port) == (3, 2, 1)
    assert config.models.model.engine == "simulated"
    assert config.models.scheduling.max_num_seqs == 256


def test_yaml_may_be_flat_or_in_sections(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("max-num-seqs: 8\nserver:\n  api_key: [a, b]\n")
    config = load(file=file)
    assert config.models.scheduling.max_num_seqs == 8
    assert config.server.api_key == ("a", "b")


def test_a_list_of_one_may_be_a_string(tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text('api_key = "a"\n')
    assert load(file=file).server.api_key == ("a",)


def test_lists_from_the_environment_are_comma_separated():
    assert load(environ={"PENSTOCK_API_KEY": "a,b"}).server.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PENSTOCK_HTP_PORT", "PENSTOCK_HTTP_PORT"),
        ("PENSTOCK_API_KEYS", "PENSTOCK_API_KEY"),
        ("PENSTOCK_PORT", "PENSTOCK_HTTP_PORT"),
        ("PENSTOCK_Http_Port", "PENSTOCK_HTTP_PORT"),
        ("PENSTOCK_MODEL_STORE", "PENSTOCK_MODEL_REPOSITORY"),
        ("PENSTOCK_XQZW", None),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(variable, meant):
    hint = f"; did you mean {meant}?" if meant else ""
    with pytest.raises(ConfigError) as refused:
        load(environ={variable: "1", "PENSTOCK_GRPC_PORT": "2"})
    assert str(refused.value) == f"{variable}: there is no such setting{hint}"


def test_service_links_of_kubernetes_are_no_settings():
    links = {}
    for service in ("PENSTOCK", "PENSTOCK_XYZ", "PENSTOCK_HTTP", "PENSTOCK_GRPC_PORT_2"):
        links |= {
            f"{service}_SERVICE_HOST": "10.0.0.1",
            f"{service}_SERVICE_PORT": "8000",
            f"{service}_SERVICE_PORT_HTTP": "8000",
            f"{service}_PORT": "tcp://10.0.0.1:8000",
            f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
            f"{service}_PORT_8000_TCP_PROTO": "tcp",
            f"{service}_PORT_8000_TCP_PORT": "8000",
            f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
            f"{service}_PORT_8001_UDP": "udp://10.0.0.1:8001",
        }
    assert load(environ=links) == load()
    assert load(environ={**links, "PENSTOCK_HTTP_PORT": "9"}).server.http_port == 9


@pytest.mark.parametrize("text", ["", "a,", ",a"])
def test_a_key_is_never_empty(monkeypatch, capsys, text):
    with pytest.raises(ConfigError, match="api_key"):
        load(environ={"PENSTOCK_API_KEY": text})
    monkeypatch.setattr(cli, "_serve", lambda config, _: 0)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--api-key", text])
    assert re.search(r"--api-key\[\d\]: it must not be empty", capsys.readouterr().err)


@pytest.mark.parametrize(("text", "memory"), [("4294967296", 4294967296), ('"4GiB"', "4GiB"), ('"40%"', "40%")])
def test_memory_is_a_number_of_bytes_or_a_text(tmp_path, text, memory):
    file = tmp_path / "penstock.toml"
    file.write_text(f"kv_cache_memory = {text}")
    assert load(file=file).models.cache.kv_cache_memory == memory


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"http_port": "70000"}, "http_port"),
        ({"http_port": "x"}, "http_port"),
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"policy": "lifo"}, "policy"),
        ({"drain_timeout": "-1"}, "drain_timeout"),
        ({"prefix_caching": "perhaps"}, "prefix_caching"),
        ({"ready_timeout": "1e-9"}, "ready_timeout"),
        ({"watchdog_timeout": "0.1"}, "watchdog_timeout"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags, named):
    with pytest.raises(ConfigError, match=named):
        load(flags)


@pytest.mark.parametrize("ready", [60, 100])
def test_readiness_cannot_wait_until_the_engine_is_replaced(ready):
    with pytest.raises(ConfigError, match=f"ready-timeout: {ready} s is not below watchdog-timeout, 60 s"):
        load({"ready_timeout": ready})
    assert load({"ready_timeout": ready, "watchdog_timeout": 101}).server.ready_timeout == ready


@pytest.mark.parametrize("text", ["htp_port = 1", "[server]\nhtp_port = 1", "= 1", '["a"]'])
def test_a_bad_file_is_refused(tmp_path, text):
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load(file=file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="config: cannot read"):
        load(file=tmp_path / "absent.toml")


def test_every_setting_has_a_flag_and_a_description(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    text = capsys.readouterr().out
    for section in SECTIONS.values():
        for name in section.__struct_fields__:
            assert name == "model" or f"--{name.replace('_', '-')}" in text, name


def test_the_help_says_whether_a_switch_is_on_and_shows_whole_seconds(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "--prefix-caching, --no-prefix-caching reuse the keys and values of prompts with equal beginnings (default: on)"
        in text
    )
    assert "listen for gRPC (default: on)" in text
    assert "other machines may use a server without keys; on a server with keys, only /metrics (default: off)" in text
    assert "seconds that running requests get to finish after SIGTERM (default: 30s)" in text


def test_the_short_help_is_short_and_leads_to_the_whole(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(flag in text for flag in ("--help-all", "--http-port", "--api-key", "--model-repository", "PENSTOCK_"))
    assert len(text.splitlines()) < 80
    assert "--grpc-http2-max-ping-strikes" not in text


def test_every_setting_that_the_short_help_names_exists():
    assert {name for section in SECTIONS.values() for name in section.__struct_fields__} >= set(cli._MOST_NEEDED)


def test_every_setting_is_documented():
    text = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    missing = [n for section in SECTIONS.values() for n in section.__struct_fields__ if f"`{n}`" not in text]
    assert not missing


def test_the_command_line_reaches_the_tree(monkeypatch):
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_serve", lambda config, _: seen.append(config) or 0)
    argv = ["serve", "folder", "--no-prefix-caching", "--api-key", "a,b", "--api-key", "c", "--request-timeout", "1.5"]
    assert cli.main(argv) == 0
    assert seen[0].models.model.model == "folder"
    assert not seen[0].models.cache.prefix_caching
    assert seen[0].server.api_key == ("a", "b", "c")
    assert seen[0].models.scheduling.request_timeout == 1.5


def test_the_http_port_has_a_short_name(monkeypatch):
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_serve", lambda config, _: seen.append(config) or 0)
    assert cli.main(["serve", "--port", "80", "--host", "::"]) == 0
    assert (seen[0].server.http_port, seen[0].server.host) == (80, "::")


def test_a_bad_flag_ends_with_usage_and_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--http-port", "70000"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "penstock serve: error: --http-port 70000: expected a whole number <= 65535\n"


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--reuse-http-port=true", "a port belongs to one server"),
        ("--host-policy=gpu_0,numa-node=0", "taskset"),
        ("--no-such-flag", "there is no flag --no-such-flag\n`penstock serve --help` shows what there is"),
        ("--model=./x", "written without a flag"),
        ("--htp-port=1", "there is no flag --htp-port\ndid you mean --http-port?"),
    ],
)
def test_what_triton_has_and_we_have_not_is_told(flag, told, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", flag])
    assert told in capsys.readouterr().err


def test_no_flag_is_both_served_and_refused():
    ours = {"--" + name.replace("_", "-") for section in SECTIONS.values() for name in section.__struct_fields__}
    assert not ours & TRITON_REFUSED.keys()


def test_options_of_unknown_backends_are_refused():
    settings = repository_settings(RepositoryConfig(backend_config=("identity,a=b", "default-max-batch-size=4")))
    assert settings.backend_options == {"identity": {"a": "b"}, "": {"default-max-batch-size": "4"}}
    with pytest.raises(ConfigError, match="no backend is called 'nosuch'"):
        repository_settings(RepositoryConfig(backend_config=("nosuch,a=b",)))


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ({}, "INFO"),
        ({"log_level": "error"}, "ERROR"),
        ({"log_verbose": "1", "log_level": "error"}, "DEBUG"),
        ({"log_info": "0"}, "WARNING"),
        ({"log_warning": "false"}, "INFO"),
        ({"log_level": "error", "log_error": "false"}, "CRITICAL"),
    ],
)
def test_triton_s_verbosity_is_a_log_level(flags, level):
    assert load(flags).server.logging_level == level


def test_ctrl_c_before_signals_are_handled_is_no_traceback(monkeypatch):
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_serve", interrupted)
    assert cli.main(["serve"]) == 130
