"""The key that an upstream asks for: never logged, never shown."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from penstock.gateway.configuration.config import ConfigError

_LOOK_SECONDS = 5.0
_KEY = re.compile(r"[\x21-\x7e]{1,8192}")


class ApiKey:
    """From a file or a variable; none where neither is given."""

    def __init__(self, file: str | None, variable: str | None) -> None:
        """Raises ConfigError."""
        self._file = None if file is None else Path(file)
        self._stamp: tuple[float, int] | None = None
        self._looked = time.monotonic()
        self._value = ""
        if self._file is not None:
            self._value = _checked(self._read(self._file), f"api_key_file: {self._file}")
        elif variable is not None:
            self._value = _checked(os.environ.get(variable, ""), f"api_key_env: the variable {variable}")

    @property
    def value(self) -> str:
        """ "" for none. A file that has changed is read again; one that cannot be read changes nothing."""
        now = time.monotonic()
        if self._file is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            try:
                stat = self._file.stat()
                if (stat.st_mtime, stat.st_size) != self._stamp:
                    self._value = _checked(self._read(self._file), "")
            except (OSError, ConfigError):
                return self._value
        return self._value

    def _read(self, file: Path) -> str:
        try:
            stat = file.stat()
            self._stamp = (stat.st_mtime, stat.st_size)
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"api_key_file: {file}: {reason}") from None


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{source} holds no key: one word of ASCII characters")
    return key
