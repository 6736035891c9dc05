"""The file of keys, and the command that writes it."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from penstock.engines.errors import AuthenticationError, PermissionDeniedError
from penstock.gateway.cli import main
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import ALL_ROLES, USER_ROLES, Role
from penstock.gateway.requests.key_file import read_keys
from penstock.gateway.server.composition.records import open_database

DIGEST = "ab" * 32


def read(path: Path, text: str, policy: str = "fcfs") -> ApiKeys:
    path.write_text(text)
    return ApiKeys(read_keys(path, policy))


def new_key(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["key", "new", *flags]) == 0
    return capsys.readouterr().out


def test_a_new_key_lets_in_and_the_file_does_not_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "1000", "--concurrent-requests", "4")
    models = ("--model", "llama", "--model", "rerank-*")
    red = new_key(capsys, "--tenant", "red", "--file", str(path), *limits, *models, "--priority", "3").strip()
    boss = new_key(capsys, "--tenant", "boss", "--file", str(path), *(f"--role={role}" for role in Role)).strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert red not in path.read_text()
    keys = ApiKeys(read_keys(path, "priority"))
    who = keys.principal(b"Bearer " + red.encode())
    assert (who.tenant, who.roles, who.priority) == ("red", USER_ROLES, 3)
    assert who.quota is not None
    assert (who.quota.limits.requests_per_minute, who.quota.limits.tokens_per_minute) == (60, 1000)
    assert [who.may_use(name) for name in ("llama", "rerank-2", "other")] == [True, True, False]
    with pytest.raises(PermissionDeniedError, match="may not use the model `other`"):
        who.require_model("other")
    admin = keys.principal(b"Bearer " + boss.encode())
    assert (admin.tenant, admin.roles, admin.quota, admin.may_use("other")) == ("boss", ALL_ROLES, None, True)
    with pytest.raises(AuthenticationError):
        keys.principal(b"Bearer " + key_digest(red.encode()).hex().encode())


def test_an_entry_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = new_key(capsys, "--tenant", "red")
    assert re.fullmatch(
        r'\[\[key\]\]\nsha256 = "[0-9a-f]{64}"\ntenant = "red"\nroles = \["inference","metadata","metrics"\]\n', entry
    )
    assert len(read_keys(_written(tmp_path, entry), "fcfs")) == 1
    assert len(read_keys(_written(tmp_path, "version = 1\n" + entry), "fcfs")) == 1


def _written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "flags", [["--tenant", "a b"], ["--tenant", "x", "--concurrent-requests", "0"], ["--tenant", "x", "--role", "root"]]
)
def test_bad_values_make_no_key(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["key", "new", *flags])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[key", "keys.toml"),
        ("[key]", "array"),
        ("[[keys]]", "unknown field `keys`"),
        ("version = 2\nfields = 3", "has version 2, and this server reads up to 1"),
        ('version = "2"', "version"),
        (f'[[key]]\nsha256 = "{DIGEST}"', "tenant"),
        (f'[[key]]\nsha256 = "{DIGEST[1:]}"\ntenant = "a"', "sha256"),
        (f'[[key]]\nsha256 = "{DIGEST}"\ntenant = "a"\nroles = ["root"]', "root"),
        (f'[[key]]\nsha256 = "{DIGEST}"\ntenant = "a"\nrequest_per_minute = 3', "request_per_minute"),
        (f'[[key]]\nsha256 = "{DIGEST}"\ntenant = "a"\n' * 2, "key 2 appears twice"),
        (f'[[key]]\nsha256 = "{DIGEST}"\ntenant = "a"\npriority = 1', "--policy=priority, not fcfs"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file or directory$"):
        read_keys(tmp_path / "gone.toml", "fcfs")


def test_a_data_folder_that_cannot_be_made_is_not_blamed_on_another_server(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: File exists$"):
        open_database(load_config({"data_dir": str(tmp_path / "file")}, environ={}))


def test_what_is_left_survives_a_reload_unless_the_limits_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = f'[[key]]\nsha256 = "{key_digest(b"one").hex()}"\ntenant = "a"\nconcurrent_requests = '
    keys = read(path, text + "2")
    before = keys.principal(b"Bearer one").quota
    path.write_text(text + '2\nroles = ["admin"]')
    keys.replace(read_keys(path, "fcfs"))
    after = keys.principal(b"Bearer one")
    assert after.quota is before
    assert after.roles == {Role.ADMIN}
    path.write_text(text + "3")
    keys.replace(read_keys(path, "fcfs"))
    assert keys.principal(b"Bearer one").quota is not before
    keys.replace({})
    with pytest.raises(AuthenticationError):
        keys.principal(b"Bearer one")
