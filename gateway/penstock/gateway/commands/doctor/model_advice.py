"""One model on this machine: the engine that would run it, the memory that it needs, how fast it can be, and which
weights to choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from penstock.engines.encoder.model_folder import makes_vectors
from penstock.engines.errors import PenstockError
from penstock.engines.host.memory import available_memory
from penstock.engines.registry import EngineSpec
from penstock.gateway.commands.doctor.findings import Finding, size_text
from penstock.gateway.configuration.config import ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.models import ModelSource, find_model, is_hub_id
from penstock.gateway.models.memory.estimate import context_bytes, decode_bytes, estimate
from penstock.tokenizers import Tokenizer, TokenizerError

_WEIGHTS = ("auto", "int8", "int4")
"""The most exact first."""
_READABLE = 8.0
"""Tokens per second: people read about as fast."""
_REACHED = "a half to nine tenths of it are reached"
"""By docs/performance.md, from small models on many cores to large ones on few."""


@dataclass(frozen=True)
class _Option:
    """A type of weights for the model, and what follows from it."""

    weights: str
    needed: int
    """Bytes with a KV cache of a useful size."""
    cache_tokens: int
    """That fit into the rest of the memory, at most; 0: the model does not fit."""
    tokens_per_second: float | None
    """Most that one request can get."""

    @property
    def name(self) -> str:
        return "weights as stored" if self.weights == "auto" else f"weights in {self.weights}"


def model_findings(settings: ModelSettings, speed: float) -> Iterator[Finding]:
    """`speed`: bytes per second that the memory is read with."""
    try:
        source = _source(settings)
        if makes_vectors(source.folder):
            yield Finding(source.name, "ok", "makes vectors or scores: `penstock serve` offers it for embeddings")
            return
        tokenizer = Tokenizer(source.folder)
        spec = engine_spec(settings, source, tokenizer)
    except (ConfigError, TokenizerError, PenstockError) as error:
        yield Finding(str(settings.model.model or "model"), "problem", str(error))
        return
    yield Finding(source.name, "ok", f"the engine is {spec.runner}; {source.folder}", {"engine": spec.runner})
    if spec.runner == "openvino":
        yield from _on_openvino(settings, source, tokenizer, speed)
    else:
        yield _on_another(spec)


def _source(settings: ModelSettings) -> ModelSource:
    """Nothing is downloaded. Raises ConfigError."""
    name = settings.model.model
    if name is None or not is_hub_id(name):
        return find_model(name)
    try:
        folder = snapshot_download(name, revision=settings.model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        raise ConfigError(f"model: {name} is not on this machine yet: penstock pull {name}") from None
    return ModelSource(Path(folder), name)


def _on_openvino(settings: ModelSettings, source: ModelSource, tokenizer: Tokenizer, speed: float) -> Iterator[Finding]:
    free = available_memory()
    kinds = _WEIGHTS if settings.model.weights == "auto" else (settings.model.weights,)
    options: list[_Option] = []
    for kind in kinds:
        try:
            spec = engine_spec(overlay(settings, {"weights": kind}), source, tokenizer)
        except ConfigError as error:
            yield Finding(f"weights in {kind}", "note", str(error))
            continue
        options.append(_option(kind, spec, free, speed))
        yield _finding(options[-1], free)
    yield _choice(options, settings.model.model or source.name, free)


def _option(weights: str, spec: EngineSpec, free: int, speed: float) -> _Option:
    needs = estimate(spec).host
    fixed = needs.weights + needs.rest
    token, read = context_bytes(spec), decode_bytes(spec)
    least = needs.cache.size(0)
    room = max(0, free - fixed)
    fits = fixed + least <= free
    return _Option(
        weights,
        needed=fixed + least,
        cache_tokens=int(room / token) if fits and token else 0,
        tokens_per_second=speed / read if read else None,
    )


def _finding(option: _Option, free: int) -> Finding:
    parts = [f"needs {size_text(option.needed)} of memory"]
    if option.tokens_per_second is not None:
        parts.append(f"at most {_rate(option.tokens_per_second)} tokens/s for one request ({_REACHED})")
    figures = {
        "weights": option.weights,
        "needed": option.needed,
        "cache_tokens": option.cache_tokens,
        "tokens_per_second": option.tokens_per_second,
    }
    if option.needed > free:
        return Finding(option.name, "note", f"{parts[0]}, and {size_text(free)} are available", figures)
    if option.cache_tokens:
        parts.append(f"memory for {option.cache_tokens} tokens of context at most, of all requests together")
    return Finding(option.name, "ok", "; ".join(parts), figures)


def _choice(options: Sequence[_Option], model: str, free: int) -> Finding:
    """`model`: as the command line has it."""
    fitting = [option for option in options if option.needed <= free]
    if not fitting:
        least = min((option.needed for option in options), default=0)
        detail = f"{model} does not fit: it needs at least {size_text(least)}, and {size_text(free)} are available"
        return Finding("choose", "problem", detail)
    quick = [option for option in fitting if (option.tokens_per_second or _READABLE) >= _READABLE]
    option = quick[0] if quick else max(fitting, key=lambda fit: fit.tokens_per_second or 0)
    flags = "" if option.weights == "auto" else f" --weights {option.weights}"
    why = "the most exact that is faster than people read" if quick else "the fastest that fits"
    return Finding("choose", "ok", f"penstock serve {quote(model)}{flags}: {why}", {"weights": option.weights})


def _on_another(spec: EngineSpec) -> Finding:
    demand = estimate(spec)
    host = demand.host.weights + demand.host.rest + demand.host.cache.size(0)
    detail = f"needs about {size_text(host)} of memory"
    figures = {"host": host}
    if demand.gpus:
        device = demand.device.weights + demand.device.rest
        detail += f", and {size_text(device)} of each of {len(demand.gpus)} GPUs beside the KV cache"
        figures["device"] = device
    free = available_memory()
    if host > free:
        return Finding("memory for it", "problem", f"{detail}; {size_text(free)} are available", figures)
    return Finding("memory for it", "ok", detail, figures)


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
