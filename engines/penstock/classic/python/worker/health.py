"""A model's own is_ready()."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from .connection import Connection, Message
from .errors import MisusedError, report


class Health:
    """Answers the server's questions, each in a thread of its own: the model may be executing meanwhile."""

    def __init__(self, connection: Connection, model: Any) -> None:
        self._connection = connection
        self._model = model
        connection.handlers["is_ready"] = self._asked
        connection.read_in_thread()

    def _asked(self, message: Message) -> None:
        threading.Thread(target=self._answer, name="penstock-is-ready", daemon=True).start()

    def _answer(self) -> None:
        try:
            found = self._model.is_ready()
            if asyncio.iscoroutine(found):
                found = asyncio.run(found)
            if not isinstance(found, bool):
                raise MisusedError(f"is_ready() must return a bool, not {type(found).__name__}")
        except BaseException as error:  # a model that calls sys.exit() has answered, too
            report(error)
            found = False
        self._connection.send("is_ready", found)
