"""GET /server_info, as SGLang's servers have it: its gateway asks the servers behind it which model they serve."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane


class ServerInfoObject(msgspec.Struct, omit_defaults=True):
    version: str
    served_model_name: str | None = None
    """The first language model's name; none while no model is loaded."""
    max_running_requests: int | None = None
    """Requests that it computes together."""
    max_total_num_tokens: int | None = None
    """That its KV cache has room for."""


class ServerInfo:
    """The server's version, and its first language model."""

    def __init__(self, dataplane: DataPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._version = settings.version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, msgspec.json.encode(self._found()))

    def _found(self) -> ServerInfoObject:
        loaded = self._dataplane.models.loaded()
        if not loaded:
            return ServerInfoObject(self._version)
        name, model = loaded[0]
        tokens = model.engine.stats.num_blocks * model.engine.info.block_size
        return ServerInfoObject(self._version, name, model.max_num_seqs, tokens)
