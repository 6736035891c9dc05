"""The database's schema version: newer files are refused and stay as they are, older ones are brought up to date."""

from __future__ import annotations

import hashlib
import importlib
import sqlite3
from pathlib import Path

import pytest

from penstock.gateway import database
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.database import Database, NewerSchemaError
from penstock.gateway.server.composition.records import open_database

APIS = "penstock.gateway.apis"
TABLES = (
    *("batches.batch_store", "batches.file_store", "usage.ledger"),
    *("responses.conversations", "responses.kept_chats", "responses.store"),
)


def version(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        [found] = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(found)


def write(path: Path, script: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


def test_a_new_file_has_this_server_s_version(tmp_path: Path) -> None:
    Database(tmp_path / "new").close()
    assert version(tmp_path / "new") == len(database._MIGRATIONS)


def test_a_file_of_a_newer_server_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sqlite"
    write(path, "CREATE TABLE usage (day TEXT); PRAGMA user_version = 9;")
    with pytest.raises(NewerSchemaError):
        Database(path)
    with pytest.raises(ConfigError, match=r"penstock\.sqlite: a newer server has written it \(schema 9, this one"):
        open_database(load_config({"data_dir": str(tmp_path)}, environ={}))
    assert version(path) == 9


def test_older_files_are_brought_up_to_date_and_keep_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    write(path, "CREATE TABLE t (a INT); INSERT INTO t VALUES (7);")  # from before versions were written
    Database(path).close()
    assert version(path) == 1
    monkeypatch.setattr(database, "_MIGRATIONS", ("", "ALTER TABLE t ADD COLUMN b INT DEFAULT 3;"))
    opened = Database(path)
    assert opened.prepare(lambda connection: connection.execute("SELECT * FROM t").fetchall()) == [(7, 3)]
    opened.close()
    assert version(path) == 2


def test_a_step_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old"
    write(path, "CREATE TABLE t (a INT); PRAGMA user_version = 1;")
    monkeypatch.setattr(database, "_MIGRATIONS", ("", "ALTER TABLE t ADD COLUMN b INT; DROP TABLE absent;"))
    with pytest.raises(sqlite3.OperationalError):
        Database(path)
    connection = sqlite3.connect(path)
    assert [row[1] for row in connection.execute("PRAGMA table_info(t)")] == ["a"]
    connection.close()
    assert version(path) == 1


def test_a_change_of_the_tables_is_another_version() -> None:
    """Other tables: a step in `_MIGRATIONS`, then the new digest here."""
    text = "".join(importlib.import_module(f"{APIS}.{module}")._SCHEMA for module in TABLES)
    assert (len(database._MIGRATIONS), hashlib.sha256(text.encode()).hexdigest()[:16]) == (1, "ede86faacd47f69f")
