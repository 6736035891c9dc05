"""Which LoRA adapters an engine has, by what its owner asks for and what becomes of that."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engines.contract.messages import CallReply, DownMessage, LoadAdapter, UnloadAdapter


class KnownAdapters:
    """Follows the owner's messages and their replies."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._loaded = dict.fromkeys(keys)
        self._loading: dict[int, str] = {}
        self.keys: tuple[str, ...] = tuple(self._loaded)
        """In the order of loading; replaced as a whole, so other threads may look."""

    def asked(self, message: DownMessage) -> None:
        if isinstance(message, LoadAdapter):
            self._loading[message.call] = message.key
        elif isinstance(message, UnloadAdapter):
            self._loaded.pop(message.key, None)
            self.keys = tuple(self._loaded)

    def answered(self, reply: CallReply) -> None:
        key = self._loading.pop(reply.call, None)
        if key is not None and reply.error is None:
            self._loaded[key] = None
            self.keys = tuple(self._loaded)
