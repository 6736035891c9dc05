"""LoadAdapter and UnloadAdapter in the engine process: carried out by the engine, if it hosts adapters."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.engines.contract.messages import AdapterReply, LoadAdapter, RequestError, UnloadAdapter
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError, UnsupportedError

logger = logging.getLogger(__name__)


def carry_out(message: LoadAdapter | UnloadAdapter, engine: object) -> AdapterReply:
    """`engine` is a ModelRunner or a Batcher. Whatever goes wrong is told in the reply; the engine works on."""
    try:
        if not isinstance(engine, AdapterHost):
            raise UnsupportedError("This engine has no LoRA adapters.")
        if isinstance(message, LoadAdapter):
            engine.load_adapter(message.key, Path(message.folder))
        else:
            engine.unload_adapter(message.key)
    except PenstockError as error:
        return AdapterReply(message.call, RequestError(error.code, error.message, error.retry_after))
    except (ValueError, OSError) as error:
        return AdapterReply(message.call, RequestError(InvalidRequestError.code, f"The adapter does not load: {error}"))
    except Exception as error:
        logger.exception("an adapter failed to load or unload")
        what = f"{type(error).__name__}: {error}"
        return AdapterReply(message.call, RequestError(EngineError.code, f"The adapter does not load: {what}"))
    return AdapterReply(message.call)
