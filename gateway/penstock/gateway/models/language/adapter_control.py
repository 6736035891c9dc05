"""Adapters that come and go while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path

from penstock.engines.errors import (
    AlreadyExistsError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    PenstockError,
    UnsupportedError,
)
from penstock.gateway.models.language.adapters import Adapter, check_name, find_folder, new_adapter
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.models import LoadedModel

logger = logging.getLogger(__name__)


class AdapterControl:
    """Loads and unloads adapters of the data plane's models. What has begun is carried through, whether its caller
    still waits or not, so an adapter is there or is not."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._loading: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def allowed(self) -> bool:
        """Whether any model takes adapters at run time (the setting `lora_directory`)."""
        return any(model.adapters.directory for model in self._dataplane.models.known())

    async def load(self, name: str, path: str, *, base: str | None = None, replace: bool = False) -> None:
        """Makes `name` an adapter of the model `base`, which only a server with one model may leave out, from the files
        at `path` below its adapter directory. With `replace` the name may be an adapter's of that model already, which
        then goes as if it were unloaded.

        Raises AlreadyExistsError for a name that is taken, InvalidRequestError, NotFoundError, UnsupportedError,
        OverloadedError, EngineError.
        """
        check_name(name)
        model, directory = self._base(base)
        self._check_free(name, model if replace else None)
        self._loading.add(name)
        await self._carry_through(self._load(model, name, directory, path))

    async def unload(self, name: str) -> None:
        """The name is unknown from now on; what runs, runs on. Returns when the engine has freed an adapter that nobody
        uses, and at once where that has to wait. Raises ModelNotFoundError, UnsupportedError, NotReadyError."""
        if name in self._loading:
            raise NotReadyError("The adapter is being loaded.", retry_after=1)
        model, adapter = self._dataplane.models.holder(name) or (None, None)
        if model is None or adapter is None:
            raise ModelNotFoundError(f"The adapter `{name[:64]}` does not exist.", param="lora_name")
        _directory(model)
        model.adapters.remove(adapter)
        logger.info("adapter %s unloaded from %s", name, model.names[0])
        used = adapter.in_flight.calls
        freed = self._carry_through(self._free(model, adapter))
        if not used:
            await freed

    def _base(self, name: str | None) -> tuple[LoadedModel, Path]:
        """The model that gets an adapter, and where its adapters lie."""
        if name is None:
            models = [model for model in self._dataplane.models.known() if model.adapters.directory]
            if len(models) != 1:
                message = "base_model_name is missing: several models of this server take adapters."
                raise InvalidRequestError(message, param="base_model_name")
            name = models[0].names[0]
        model, adapter = self._dataplane.models.own_language(name, "base_model_name")
        if adapter is not None:
            message = f"`{name[:64]}` is an adapter itself, not a model."
            raise InvalidRequestError(message, param="base_model_name")
        return model, _directory(model)

    def _check_free(self, name: str, owner: LoadedModel | None) -> None:
        """Raises AlreadyExistsError unless the name is free, or an adapter's of `owner`."""
        holder = self._dataplane.models.holder(name)
        is_taken = self._dataplane.models.model(name) is not None
        model = None if holder is None or holder.adapter is None else holder.model
        if name in self._loading or (is_taken and (model is None or model is not owner)):
            replaceable = model is not None and owner is None
            hint = "; load_inplace replaces it" if replaceable else ""
            raise AlreadyExistsError(f"The name `{name[:64]}` is taken{hint}.", param="lora_name")

    def _carry_through(self, work: Coroutine[None, None, None]) -> asyncio.Future[None]:
        """Cancelling the result does not cancel the work."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # has been told, or nobody waits for it any more

    async def _load(self, model: LoadedModel, name: str, directory: Path, path: str) -> None:
        model.in_flight.begin()
        try:
            folder = await asyncio.to_thread(find_folder, directory, path)
            adapter = new_adapter(name, folder)
            await model.sleep.awake()
            await _load_into(model, adapter)
            await self._publish(model, adapter)
        finally:
            model.in_flight.end()
            self._loading.discard(name)

    async def _publish(self, model: LoadedModel, adapter: Adapter) -> None:
        """Gives it its name, unless a model that came meanwhile has it, or its own model has gone."""
        holder = self._dataplane.models.holder(adapter.name)
        is_taken = self._dataplane.models.model(adapter.name) is not None
        error: PenstockError | None = None
        if model not in self._dataplane.models.known():
            error = ModelNotFoundError(f"The model `{model.names[0]}` was unloaded meanwhile.", param="base_model_name")
        elif is_taken and (holder is None or holder.model is not model):
            error = AlreadyExistsError(f"The name `{adapter.name[:64]}` is taken.", param="lora_name")
        if error is not None:
            await self._free(model, adapter)
            raise error
        before = model.adapters.put(adapter)
        logger.info("adapter %s loaded for %s", adapter.name, model.names[0])
        if before is not None:
            self._carry_through(self._free(model, before))

    async def _free(self, model: LoadedModel, adapter: Adapter) -> None:
        await adapter.in_flight.wait_idle()
        try:
            await model.engine.unload_adapter(adapter.key)
        except (EngineDeadError, NotReadyError):
            pass  # it went with its process
        except PenstockError as error:
            logger.warning("adapter %s could not be freed: %s", adapter.name, error.message)


def _directory(model: LoadedModel) -> Path:
    """Raises UnsupportedError for a model whose adapters stay as they are."""
    if model.adapters.directory is None:
        message = f"The adapters of the model `{model.names[0]}` stay as they are: it has no lora-directory."
        raise UnsupportedError(message, param="base_model_name")
    return model.adapters.directory


async def _load_into(model: LoadedModel, adapter: Adapter) -> None:
    try:
        await model.engine.load_adapter(adapter.key, adapter.folder)
    except PenstockError as error:
        error.message = error.message.replace(str(adapter.folder), adapter.root)  # engines may name files
        raise
