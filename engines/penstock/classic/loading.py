"""Loading: from a backend's name (an entry point of `penstock.backends`, or a backend.py beside the model) and a
configuration to running instances."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from penstock.classic.base import (
    AsyncInstance,
    Backend,
    BackendInstance,
    BackendModel,
    InstanceContext,
    ModelContext,
)
from penstock.classic.batching.custom import CustomStrategy, load_strategy
from penstock.classic.batching.rate_limiter import ModelLimits, RateLimiter, has_rate_limits
from penstock.classic.batching.sequences.batcher import SequenceBatcher
from penstock.classic.classic_model import ClassicModel
from penstock.classic.instances import Instance, TaskInstance, ThreadInstance, instance_contexts
from penstock.classic.model_files import run_file
from penstock.engines.errors import PenstockError
from penstock.engines.host.failure_text import as_load_error

logger = logging.getLogger(__name__)

GROUP = "penstock.backends"


def backend_names() -> list[str]:
    """What `find_backend` knows, sorted; nothing is imported."""
    return sorted(_entries())


def find_backend(name: str) -> type[Backend]:
    """The backend of this name; only its own module is imported.

    Raises ValueError for an unknown name, with the known ones, and for a plugin that cannot be imported or is none.
    """
    entry = _entries().get(name)
    if entry is None:
        raise ValueError(f"no backend is called '{name}'; there are {', '.join(backend_names()) or 'none'}")
    try:
        backend = entry.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the backend '{name}' cannot be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ValueError(f"the entry point '{name}' of {GROUP} is not a Backend")
    return backend


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


__all__ = ["ClassicModel", "load_model"]


A = TypeVar("A")
T = TypeVar("T")


async def load_model(context: ModelContext, backend: Backend, limiter: RateLimiter | None = None) -> ClassicModel:
    """A model version that serves: loaded by its backend, with all instances of its groups, these in parallel.

    `limiter` is that of the server, where it has one.

    Raises PenstockError or ValueError when any of it fails; what had been loaded until then is unloaded. When the task
    is cancelled, instances in processes end at once; threads cannot be stopped, and it ends after those that load.
    """
    contexts = instance_contexts(context.config)
    sequences = None
    if context.config.HasField("sequence_batching"):
        sequences = await asyncio.to_thread(SequenceBatcher, context.config, context.model_folder, len(contexts))
    limits = None
    if limiter is not None and has_rate_limits(context.config):
        limits = ModelLimits(context.config, limiter)
    try:
        strategy = await _in_thread(load_strategy, context, _close_strategy)
        try:
            return await _load(context, backend, contexts, sequences, limits, strategy)
        except BaseException:
            await _close_strategy(strategy)
            raise
    except BaseException:
        if limits is not None:
            limits.close()
        raise


async def _load(
    context: ModelContext,
    backend: Backend,
    contexts: Sequence[InstanceContext],
    sequences: SequenceBatcher | None,
    limits: ModelLimits | None,
    strategy: CustomStrategy | None,
) -> ClassicModel:
    backend_model = await _in_thread(backend.load_model, context, _unload_model)
    try:
        model = ClassicModel(context, backend_model, sequences, limits, strategy)
        loads = [_load_instance(backend_model, one) for one in contexts]
        loaded = await _all(loads, _unload_instance)
    except BaseException:
        await _unload_model(backend_model)
        raise
    model.attach([_driven(one, instance, model) for one, instance in zip(contexts, loaded, strict=True)])
    return model


async def _load_instance(model: BackendModel, context: InstanceContext) -> BackendInstance | AsyncInstance:
    instance = await _in_thread(model.load_instance, context, _unload_instance)
    if isinstance(instance, AsyncInstance):
        await instance.start()
    return instance


def _driven(context: InstanceContext, loaded: BackendInstance | AsyncInstance, model: ClassicModel) -> Instance:
    loop = asyncio.get_running_loop()
    if isinstance(loaded, AsyncInstance):
        return TaskInstance(context.name, loaded, model, loop)
    return ThreadInstance(context.name, loaded, model, loop)


async def _all(loads: Sequence[Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[None]]) -> list[T]:
    """All of them, or the first error, after the others have been undone. Cancelling it cancels them."""
    tasks = [asyncio.create_task(load) for load in loads]
    together = asyncio.gather(*tasks, return_exceptions=True)
    cancelled: asyncio.CancelledError | None = None
    try:
        results = await asyncio.shield(together)
    except asyncio.CancelledError as error:
        cancelled = error
        for task in tasks:
            task.cancel()
        results = await together
    errors = [result for result in results if isinstance(result, BaseException)]
    loaded = [result for result in results if not isinstance(result, BaseException)]
    if not errors and cancelled is None:
        return loaded
    for one in loaded:
        await undo(one)
    raise cancelled or errors[0]


async def _in_thread(load: Callable[[A], T], argument: A, undo: Callable[[T], Awaitable[None]]) -> T:
    """In a thread. Cancelled, it waits for the thread, and undoes what that has loaded."""
    loading = asyncio.create_task(asyncio.to_thread(_guarded, load, argument))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        [loaded] = await asyncio.gather(loading, return_exceptions=True)
        if not isinstance(loaded, BaseException):
            await undo(loaded)
        raise


async def _unload_instance(instance: BackendInstance | AsyncInstance) -> None:
    if isinstance(instance, AsyncInstance):
        await instance.unload()
    else:
        await asyncio.to_thread(instance.unload)


async def _close_strategy(strategy: CustomStrategy | None) -> None:
    if strategy is not None:
        await asyncio.to_thread(strategy.close)


async def _unload_model(model: BackendModel) -> None:
    await asyncio.to_thread(model.unload)


def _guarded(load: Callable[[A], T], argument: A) -> T:
    """Backends raise PenstockError or ValueError; what else they raise becomes an error of the server."""
    try:
        return load(argument)
    except (PenstockError, ValueError):
        raise
    except Exception as error:
        raise as_load_error(error) from error


BACKEND_FILENAME = "backend.py"


def load_backend_file(path: Path, owner: str) -> type[Backend]:
    """The one Backend that the file defines; each call runs the file again.

    `owner` is what messages call its owner (`model 'm'`), of whom there is one with this name. Raises ValueError, with
    the line, when it cannot be run or has no such class.
    """
    name = f"penstock_backend_file_{sha256(owner.encode()).hexdigest()[:16]}"
    try:
        module = run_file(path, name)  # the last one of an owner stays in sys.modules, and no other
    except (Exception, SystemExit) as error:  # sys.exit() would end the server
        raise ValueError(f"{BACKEND_FILENAME} of {owner} cannot be loaded: {_message(error, path)}") from error
    return _backend(module, owner)


def _message(error: BaseException, path: Path) -> str:
    """The error and its line, without folders of this machine."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}".replace(f"{path.parent}/", "")[:400]


def _backend(module: ModuleType, owner: str) -> type[Backend]:
    matches = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Backend) and value.__module__ == module.__name__
    ]
    if len(matches) != 1:
        names = ", ".join(value.__name__ for value in matches) or "none"
        raise ValueError(
            f"{BACKEND_FILENAME} of {owner} must define one class that derives from Backend, and has {names}"
        )
    return matches[0]
