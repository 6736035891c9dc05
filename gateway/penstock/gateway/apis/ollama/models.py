"""Models as Ollama's API shows them: /api/tags, /api/ps, /api/show and /api/pull."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, UnsupportedError
from penstock.gateway.apis.ollama.model_files import ModelFiles, read_model_files
from penstock.gateway.apis.ollama.schemas import PullRequest, ShowRequest, model_name
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Served, Upstream, upstream_of
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

OLLAMA_VERSION = "0.12.11"
"""Of Ollama's API: what is answered here has the fields that it had then. Clients refuse versions that are too old for
them: VS Code those before 0.6.4."""
_CAPABILITIES = ("completion", "tools", "thinking", "insert", "vision", "embedding")
"""Those that Ollama knows."""
_NEVER = "9999-12-31T23:59:59Z"
_LAST_SECOND = 253_402_300_799.0
"""The same in Unix seconds: dates end there, and callers may ask for more."""
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}
"""Ollama's words for sampling defaults, where it has others."""
_NO_FILES = ModelFiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One name, with what is shown of it."""

    name: str
    created: int = 0
    folder: str = ""
    """"": not known, since it is not loaded."""
    adapter_of: str = ""
    context_length: int | None = None
    on_gpu: bool = False
    capabilities: Sequence[str] = ("completion",)
    template: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    stops: Sequence[str] = ()
    expires_at: str | None = None
    """None: it is not awake."""


class OllamaModels:
    """Those that are loaded, of every kind, and those that a request would load."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._files: dict[str, tuple[int, ModelFiles]] = {}
        """By folder, with the time at which the model was loaded."""

    async def listed(self, exchange: Exchange) -> list[dict[str, Any]]:
        """That the caller may use."""
        return [_entry(model, await self._files_of(model)) for model in self._known(exchange)]

    async def running(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Those of `listed` that are awake, with the time at which they sleep or are unloaded if no request comes."""
        entries = []
        for model in self._known(exchange):
            if model.expires_at is not None:
                files = await self._files_of(model)
                about = {"size_vram": files.size if model.on_gpu else 0, "expires_at": model.expires_at}
                entries.append({**_entry(model, files), **about, "context_length": model.context_length or 0})
        return entries

    async def shown(self, tagged_name: str, exchange: Exchange) -> dict[str, Any]:
        """Raises ModelNotFoundError, NotReadyError, PermissionDeniedError."""
        model = self._named(tagged_name, exchange)
        return _description(model, await self._files_of(model))

    async def entry(self, tagged_name: str, exchange: Exchange) -> dict[str, Any]:
        """As /api/tags has it. Raises as `shown`."""
        model = self._named(tagged_name, exchange)
        return _entry(model, await self._files_of(model))

    def _known(self, exchange: Exchange) -> list[_Model]:
        may_use, listed = exchange.context.principal.may_use, self.catalogue.listed()
        return [self._model(name, served) for name, served in listed if may_use(name)]

    def _named(self, tagged_name: str, exchange: Exchange) -> _Model:
        name = model_name(tagged_name, self.catalogue.__contains__)
        exchange.context.principal.require_model(name)
        return self._model(name, self.catalogue.first(name))

    def _model(self, name: str, served: Served | None) -> _Model:
        if served is None:
            return _Model(name=name)
        if isinstance(served, NameHolder):
            return _language_model(name, served, self.catalogue.seconds_left(served.model))
        return _encoder(name, served) if isinstance(served, PoolingModel) else _upstream(name, served)

    async def _files_of(self, model: _Model) -> ModelFiles:
        """Read once for each load of a model, when they are first asked for, beside the event loop."""
        if not model.folder:
            return _NO_FILES
        known = self._files.get(model.folder)
        if known is None or known[0] != model.created:
            known = model.created, await asyncio.to_thread(read_model_files, Path(model.folder))
            self._files[model.folder] = known
        return known[1]


def _language_model(name: str, holder: NameHolder, left: float | None) -> _Model:
    model, adapter = holder
    described = holder.describe(name)
    tokens = (model.tokenizer.decode([token], skip_special_tokens=False) for token in described.info.eos_token_ids)
    return _Model(
        name=name,
        created=described.created,
        folder="" if model.texts is None else model.texts.folder,
        adapter_of="" if adapter is None else model.names[0],
        context_length=described.info.context_length,
        on_gpu="cuda" in described.info.runner,
        capabilities=described.capabilities,
        template="" if model.chat_template is None else model.chat_template.source,
        parameters=described.default_params,
        stops=list(tokens),
        expires_at=None if model.sleep.asleep else _NEVER if left is None else _time(time.time() + left),
    )


def _encoder(name: str, model: PoolingModel) -> _Model:
    return _Model(
        name=name,
        created=model.created,
        folder=model.folder,
        context_length=model.source.info.max_tokens,
        capabilities=model.capabilities,
        expires_at=_NEVER,
    )


def _upstream(name: str, model: Upstream) -> _Model:
    """Another server's is never awake here."""
    return _Model(
        name=name,
        created=model.created,
        folder=model.folder,
        capabilities=("embedding",) if model.apis == ("embeddings",) else ("completion",),
        expires_at=_NEVER if model.folder else None,
    )


async def show_running(models: OllamaModels, exchange: Exchange) -> None:
    """Those that are awake, and how long they stay so."""
    await exchange.respond(200, msgspec.json.encode({"models": await models.running(exchange)}))


async def show_all(models: OllamaModels, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode({"models": await models.listed(exchange)}))


async def show(models: OllamaModels, settings: AppSettings, exchange: Exchange) -> None:
    request = parse(await exchange.body(settings.max_body_bytes, from_curl=True), ShowRequest, {})
    await exchange.respond(200, msgspec.json.encode(await models.shown(named_model(request), exchange)))


async def show_version(settings: AppSettings, exchange: Exchange) -> None:
    body = {"version": OLLAMA_VERSION, "penstock_version": settings.version}
    await exchange.respond(200, msgspec.json.encode(body))


def named_model(request: ShowRequest) -> str:
    """Raises InvalidRequestError."""
    tagged_name = request.model or request.name
    if not tagged_name:
        raise InvalidRequestError("model is missing.", param="model")
    return tagged_name


def _entry(model: _Model, files: ModelFiles) -> dict[str, Any]:
    digest = files.digest
    if model.adapter_of or not digest:
        digest = hashlib.sha256(f"{digest} {model.name}".encode()).hexdigest()
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _modified(model, files),
        "size": files.size,
        "digest": digest,
        "details": {**files.details, "parent_model": model.adapter_of},
    }


def _description(model: _Model, files: ModelFiles) -> dict[str, Any]:
    parameters = {_PARAMETERS.get(name, name): value for name, value in model.parameters.items()}
    if model.context_length is not None:
        parameters["num_ctx"] = model.context_length
    lines = [(name, f"{value}") for name, value in parameters.items()]
    lines += [("stop", msgspec.json.encode(text).decode()) for text in model.stops]
    family = files.family or "model"
    known = {} if model.context_length is None else {f"{family}.context_length": model.context_length}
    licensed = {"license": files.license} if files.license else {}
    return {
        **licensed,
        "modelfile": _modelfile(model, lines),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in lines),
        "template": model.template,
        "details": {**files.details, "parent_model": model.adapter_of},
        "model_info": {"general.architecture": family, **files.info, **known},
        "capabilities": [capability for capability in model.capabilities if capability in _CAPABILITIES],
        "modified_at": _modified(model, files),
    }


def _modelfile(model: _Model, parameters: Sequence[tuple[str, str]]) -> str:
    template = [f'TEMPLATE """{model.template}"""'] if model.template else []
    lines = [f"FROM {model.adapter_of or model.name}", *template]
    return "\n".join([*lines, *(f"PARAMETER {name} {value}" for name, value in parameters)])


def _modified(model: _Model, files: ModelFiles) -> str:
    return _time(model.created if files.modified is None else files.modified)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, _LAST_SECOND), UTC).isoformat().replace("+00:00", "Z")


_JSON_LINES = b"application/x-ndjson"
_encode = msgspec.json.Encoder().encode


class Pull:
    """POST /api/pull. Clients ask for a model before they use it: for one that is here, all is done already."""

    def __init__(self, models: OllamaModels, settings: AppSettings) -> None:
        self._models = models
        self._settings = settings

    async def handle(self, exchange: Exchange) -> None:
        request = parse(await exchange.body(self._settings.max_body_bytes, from_curl=True), PullRequest, {})
        states = await self._states(named_model(request), exchange)
        if request.stream is False:
            await exchange.respond(200, _encode(states[-1]))
        else:
            body = b"".join(_encode(state) + b"\n" for state in states)
            await exchange.respond(200, body, content_type=_JSON_LINES)

    async def _states(self, tagged_name: str, exchange: Exchange) -> list[dict[str, Any]]:
        """Raises ModelNotFoundError, NotReadyError, PermissionDeniedError."""
        catalogue = self._models.catalogue
        name = model_name(tagged_name, catalogue.__contains__)
        layers = []
        if name in catalogue and upstream_of(catalogue.first(name)) is not None:
            exchange.context.principal.require_model(name)
        else:
            layers = await self._layers(tagged_name, exchange)
        texts = ("verifying sha256 digest", "writing manifest", "success")
        return [{"status": "pulling manifest"}, *layers, *({"status": text} for text in texts)]

    async def _layers(self, tagged_name: str, exchange: Exchange) -> list[dict[str, Any]]:
        """None while the size is not known: clients divide by it."""
        try:
            entry = await self._models.entry(tagged_name, exchange)
        except ModelNotFoundError:
            message = (
                "pull model manifest: file does not exist. The models of this server are those of GET /api/tags: its "
                "operator downloads others (`penstock pull`), and no request does."
            )
            raise ModelNotFoundError(message, param="model") from None
        digest, size = entry["digest"], entry["size"]
        if not size:
            return []
        return [{"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": size, "completed": size}]


async def operators_only(exchange: Exchange) -> None:
    """/api/create, /api/copy, /api/delete and /api/push: models are the operator's."""
    raise UnsupportedError(
        "The models of this server are chosen by its operator, and no request creates, copies, deletes or pushes "
        "them: start it with `penstock serve MODEL` or a model repository."
    )
