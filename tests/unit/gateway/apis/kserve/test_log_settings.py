"""Log settings change what Python's logging writes."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.kserve.logs import LogSettings

LEVELS = ("debug", "info", "warning", "error")


class Log:
    """A root logger with one handler, and what it wrote."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def lines(self, logger: str = "penstock.gateway.x") -> list[str]:
        """What is written of one record of each level."""
        self.stream.seek(0)
        self.stream.truncate()
        for level in LEVELS:
            getattr(logging.getLogger(logger), level)("hello")
        return self.stream.getvalue().splitlines()

    def levels(self, logger: str = "penstock.gateway.x") -> list[str]:
        return [line.split()[-2].lower() for line in self.lines(logger)]


@pytest.fixture
def log() -> Iterator[Log]:
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    handlers, level, own = root.handlers[:], root.level, ours.level
    made = Log()
    root.handlers[:] = [made.handler]
    root.setLevel(logging.INFO)
    ours.setLevel(logging.NOTSET)
    yield made
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(own)


def test_switches_at_the_start(log: Log) -> None:
    settings = LogSettings(handlers=[log.handler], switches={"log_warning": False, "log_format": "ISO8601"})
    assert log.levels() == ["info", "error"]
    assert "Z INFO " in log.lines()[0]
    settings.update({"log_warning": True, "log_format": "default"})
    assert log.levels() == ["info", "warning", "error"]
    settings.update({"log_warning": None})
    assert log.levels() == ["info", "error"]


def test_starts_with_what_is_configured(log: Log) -> None:
    settings = LogSettings("/var/log/x", [log.handler])
    assert settings.settings() == {
        "log_file": "/var/log/x",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert list(settings.settings()) == [
        "log_file",
        "log_info",
        "log_warning",
        "log_error",
        "log_verbose_level",
        "log_format",
    ]
    assert log.levels() == ["info", "warning", "error"]


def test_a_quiet_server_says_so(log: Log) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    found = LogSettings(handlers=[log.handler]).settings()
    assert (found["log_info"], found["log_warning"]) == (False, True)


def test_each_level_has_its_switch(log: Log) -> None:
    settings = LogSettings(handlers=[log.handler])
    settings.update({"log_warning": False, "log_verbose_level": 1})
    assert log.levels() == ["debug", "info", "error"]
    settings.update({"log_info": False, "log_error": False})
    assert log.levels() == ["debug"]
    settings.update({"log_verbose_level": 0, "log_warning": True})
    assert log.levels() == ["warning"]
    settings.update({"log_warning": False})
    assert log.levels() == []


def test_null_brings_back_the_start(log: Log) -> None:
    settings = LogSettings(handlers=[log.handler])
    settings.update({"log_info": False, "log_verbose_level": 3})
    assert settings.settings()["log_verbose_level"] == 3
    settings.update({"log_info": None, "log_verbose_level": None})
    assert log.levels() == ["info", "warning", "error"]


def test_other_loggers_are_left_alone(log: Log) -> None:
    LogSettings(handlers=[log.handler]).update({"log_info": False, "log_warning": False, "log_error": False})
    assert log.levels("somebody.else") == ["info", "warning", "error"]
    assert log.levels("penstocks") == ["info", "warning", "error"]


def test_time_as_iso_8601(log: Log) -> None:
    settings = LogSettings(handlers=[log.handler])
    before = log.lines()[0]
    settings.update({"log_format": "ISO8601"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO hello", log.lines()[0])
    settings.update({"log_format": "default"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO hello", before)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO hello", log.lines()[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_info", "true"),
        ("log_info", 1),
        ("log_warning", []),
        ("log_verbose_level", -1),
        ("log_verbose_level", 1.0),
        ("log_verbose_level", True),
        ("log_verbose_level", "1"),
        ("log_verbose_level", 2**32),
        ("log_format", "iso"),
        ("log_format", 1),
        ("log_format", ["default"]),
        ("log_warnings", False),
        ("foo", None),
    ],
)
def test_bad_values_change_nothing(log: Log, name: str, value: object) -> None:
    settings = LogSettings(handlers=[log.handler])
    with pytest.raises(InvalidRequestError, match=name):
        settings.update({"log_error": False, name: value})
    assert log.levels() == ["info", "warning", "error"]
    assert settings.settings()["log_error"] is True


@pytest.mark.parametrize("value", ["/tmp/x", "", None])
def test_the_file_is_the_operators(log: Log, value: object) -> None:
    with pytest.raises(UnsupportedError, match="log file location can not be updated through network protocol"):
        LogSettings(handlers=[log.handler]).update({"log_file": value})
