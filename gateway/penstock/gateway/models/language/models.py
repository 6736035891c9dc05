"""A served model: its engine, tokenizer and chat template under its public names; and where models come from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from penstock.engines.client.engine import Drainable, Engine
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.formats.gguf.files import SUFFIX, all_parts, config_of, read_parts, sampling_of
from penstock.engines.formats.model_files import read_json_if_any, real_path
from penstock.engines.host.user_cache import user_cache
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language.adapters import Adapter, AdapterSet, CallCounter
from penstock.gateway.models.language.images.reader import ImageReader
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.model_sleep import ModelSleep
from penstock.tokenizers import (
    ChatTemplate,
    ContentFormat,
    ReasoningParser,
    SpecialTextGuard,
    Tokenizer,
    TokenizerError,
    ToolParser,
    detect_reasoning_parser,
    detect_tool_parser,
    find_reasoning_parser,
    find_tool_parser,
)
from penstock.tokenizers.gguf_tokenizer import end_token_ids_of, tokenizer_config_of, tokenizer_of
from penstock.tokenizers.parsing import harmony
from penstock.tokenizers.token_table import DecoderKind

logger = logging.getLogger("penstock")

_LAYOUT = "5"
"""Of what is made here: a change makes new folders."""


def unpack(path: Path) -> Path:
    """The folder, in the user's cache; made at the first start with a file, and found again at the next ones.

    Raises ConfigError for a file that cannot be read, and for a model that cannot be described in this way.
    """
    try:
        parts = all_parts(path)
        folder = user_cache("gguf") / _digest(parts)
        if not folder.is_dir():
            _fill(folder, parts)
    except (PenstockError, TokenizerError) as error:
        reason = str(getattr(error, "message", error))
        raise ConfigError(f"model: {reason if path.name in reason else f'{path.name}: {reason}'}") from None
    except OSError as error:
        raise ConfigError(
            f"model: {path.name} cannot be unpacked: {error.strerror}: {error.filename}; XDG_CACHE_HOME names another "
            "place for the cache"
        ) from None
    return folder


def _digest(parts: list[Path]) -> str:
    """Of what these files are now: another file at the same place has another size or time."""
    known = [(str(real_path(part)), (stat := part.stat()).st_size, stat.st_mtime_ns) for part in parts]
    return hashlib.sha256(repr((_LAYOUT, known)).encode()).hexdigest()[:32]


def _fill(folder: Path, parts: list[Path]) -> None:
    metadata, tensors, _ = read_parts(parts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own first: another server may be at it, and this one may be ended.
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        tokenizer_of(metadata).save(str(draft / "tokenizer.json"))
        _write(draft / "tokenizer_config.json", tokenizer_config_of(metadata))
        _write(draft / "config.json", config_of(metadata, tensors))
        _write(draft / "generation_config.json", {"eos_token_id": end_token_ids_of(metadata), **sampling_of(metadata)})
        for part in parts:  # by their names here: what these lead to may be called by a checksum
            (draft / part.name).symlink_to(real_path(part))
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))


AUTO, NONE = "auto", "none"
_THOUGHT_TAGS = ("<think>", "</think>")
_P = TypeVar("_P")


@dataclass(frozen=True, slots=True)
class ModelParsers:
    tools: ToolParser | None = None
    """None: calls cannot be told from text, so requests cannot have tools."""
    reasoning: ReasoningParser | None = None
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that the parsers look for."""
    added_texts: Mapping[str, int] = field(default_factory=dict)
    """`Tokenizer.added_texts`: grammars write these tokens by number."""
    own_tags: frozenset[str] = frozenset(_THOUGHT_TAGS)
    """What clients may send back in an assistant's content as the model wrote it."""


NO_PARSERS = ModelParsers()


def choose_parsers(tools: str, reasoning: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> ModelParsers:
    """`tools`, `reasoning`: a parser's name, auto, or none. Raises ConfigError for names that there are not."""
    calls, thoughts = _detected(template)
    tool_parser = _chosen("tool-parser", tools, calls, find_tool_parser)
    reasoning_parser = _chosen("reasoning-parser", reasoning, thoughts, find_reasoning_parser)
    markers = [marker for parser in (tool_parser, reasoning_parser) if parser for marker in parser.markers]
    return ModelParsers(
        tool_parser,
        reasoning_parser,
        shown_tokens=tokenizer.special_ids_of(markers),
        added_texts=tokenizer.added_texts,
        # Those of gpt-oss also begin and end turns, and no client ever sees them.
        own_tags=frozenset([*_THOUGHT_TAGS, *markers]) - set(harmony.MARKERS),
    )


def _detected(template: ChatTemplate | None) -> tuple[str | None, str | None]:
    """For calls and for reasoning. A template that is for chats with tools alone is the one that shows calls."""
    if template is None:
        return None, None
    with_tools = template.with_tools.source
    reasoning = detect_reasoning_parser(template.source) or detect_reasoning_parser(with_tools)
    return detect_tool_parser(with_tools), reasoning


def _chosen(flag: str, setting: str, detected: str | None, find: Callable[[str], _P]) -> _P | None:
    name = detected if setting == AUTO else setting
    if name is None or name == NONE:
        return None
    try:
        return find(name)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


DEMO_NAME = "penstock-demo"
_LIKE_PATHS = (".", "/", "~")
_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)
"""ORG/NAME, or one of the oldest models, which have no ORG: gpt2."""
_OF_MODELS = ("config.json", "tokenizer.json", "tokenizer.model", "modules.json")
"""A folder with none of them has no model. Of those that lack another, what reads the file says so."""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, or an adapter of one, under one public name."""

    name: str
    root: str
    """The folder's name or the hub id it came from: shown in /v1/models, so never a path."""
    created: int
    """Unix seconds."""
    info: ModelInfo
    default_params: dict[str, Any] = field(default_factory=dict)
    """From the model's generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty, where set. Fronts
    use these where the caller is silent."""
    has_chat_template: bool = True
    template_variables: frozenset[str] | None = None
    """What the chat template reads; None: not known."""
    template_roles: frozenset[str] = frozenset()
    """Roles of messages that the chat template reads beside those that all do."""
    parsers: ModelParsers = NO_PARSERS
    joins_special_tokens: bool = True
    """Its tokenizer writes special tokens without spaces between them."""
    fills_in: bool = False
    """It has tokens for the text between two others."""
    reads_images: bool = False
    parent: str | None = None
    """Of an adapter: its model's first name."""

    @property
    def capabilities(self) -> list[str]:
        """By Ollama's names, and `chat` and `structured_output`."""
        capabilities = {
            "completion": True,
            "chat": self.has_chat_template,
            "tools": self.parsers.tools is not None,
            "thinking": self.parsers.reasoning is not None,
            "structured_output": self.info.supports_grammars,
            "insert": self.fills_in,
            "vision": self.reads_images,
        }
        return [name for name, there in capabilities.items() if there]


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's tokenizer and chat template are, and what the operator has said of them. Names are those of the
    settings."""

    folder: str
    chat_template: str | None
    chat_template_content_format: Literal["auto", "string", "openai"]
    special_tokens_in_content: bool
    tool_parser: str
    reasoning_parser: str


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A language model with all that the data plane needs of it; `loaded` once it gets requests."""

    names: tuple[str, ...]
    root: str
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    metrics: ModelMetrics
    default_params: dict[str, Any]
    parsers: ModelParsers = NO_PARSERS
    guard: SpecialTextGuard | None = None
    """None: the text of a special token in a chat is that token."""
    images: ImageReader | None = None
    """None: its files say nothing of images, or they cannot be prepared here."""
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: bool = False
    adapters: AdapterSet = field(default_factory=AdapterSet)
    in_flight: CallCounter = field(default_factory=CallCounter)
    max_num_seqs: int = 1
    """Requests that it computes together."""
    sleep_idle_seconds: float = 0.0
    salt_key: bytes | None = None
    """Makes salts of tenants that later starts make, too; None: the data plane's, which is of this process."""
    texts: TextSettings | None = None
    """From which another process can make the same tokenizer, template and parsers; None: it cannot."""
    sleep: ModelSleep = field(init=False)

    def __post_init__(self) -> None:
        self.sleep = ModelSleep(self.names[0], self.engine, self.in_flight, self.sleep_idle_seconds)

    @property
    def ready(self) -> bool:
        """Whether a request would be served now, if need be after the model has woken up."""
        return self.engine.ready or self.sleep.wakes_by_itself

    @property
    def image_reader(self) -> ImageReader | None:
        """None: the model, as this engine runs it, reads text only."""
        reader = self.images
        return reader if reader is not None and reader.grid == self.engine.info.image_grid else None

    async def start(self) -> None:
        """As `Engine.start`."""
        await self.engine.start()
        self.sleep.begin()

    async def drain(self) -> None:
        """Other servers that use its engine get no new requests in; returns when it works for nobody."""
        if isinstance(self.engine, Drainable):
            await self.engine.drain()

    async def stop(self) -> None:
        await self.sleep.end()
        await self.engine.stop()

    def describe(self, name: str, adapter: Adapter | None = None) -> ServedModel:
        return ServedModel(
            name=name,
            root=self.root if adapter is None else adapter.root,
            created=self.created if adapter is None else adapter.created,
            info=self.engine.info,
            default_params=self.default_params,
            has_chat_template=self.chat_template is not None,
            template_variables=None if self.chat_template is None else self.chat_template.variables,
            template_roles=frozenset() if self.chat_template is None else self.chat_template.roles,
            parsers=self.parsers,
            joins_special_tokens=self.tokenizer.table.family is not DecoderKind.GENERAL,
            fills_in=self.tokenizer.fill_in_middle is not None,
            reads_images=self.image_reader is not None,
            parent=None if adapter is None else self.names[0],
        )


class NameHolder(NamedTuple):
    """Whose a name is."""

    model: LoadedModel
    adapter: Adapter | None = None
    """The adapter of `model` that has the name; None: it is the model's own."""

    def describe(self, name: str) -> ServedModel:
        return self.model.describe(name, self.adapter)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are, and what to call it."""

    folder: Path
    name: str


def find_model(model: str | None) -> ModelSource:
    """The demo model, a local folder, or a GGUF file. Raises ConfigError for anything else."""
    if model is None or model == DEMO_NAME:
        return ModelSource(Path(str(files("penstock.gateway") / "demo_model")), DEMO_NAME)
    path = _path(model)
    if path.suffix == SUFFIX and path.is_file():
        return ModelSource(unpack(path), path.stem)
    if path.is_dir() and not (path / "config.json").exists() and any(path.glob("*" + SUFFIX)):
        return ModelSource(unpack(_only_file(path)), path.resolve().name)
    if not path.is_dir():
        raise ConfigError(f"model: {_no_folder(model, path)}")
    if not any((path / name).exists() for name in _OF_MODELS):
        raise ConfigError(f"model: {_no_model(path)}")
    return ModelSource(path, path.resolve().name)


def _path(model: str) -> Path:
    """Without an error for ~NAME where there is no such user."""
    return Path(os.path.expanduser(model))


def _no_folder(model: str, path: Path) -> str:
    if path.is_file():
        hint = "; a file of settings is given by --config" if path.suffix in (".toml", ".yaml", ".yml") else ""
        return f"{model} is neither a GGUF file ({SUFFIX}) nor a folder with a model{hint}"
    if model.endswith(SUFFIX):
        return f"there is no file {model}"
    if model.startswith(_LIKE_PATHS):
        return f"there is no folder or file {model}"
    hint = "; NAME:TAG is how Ollama names models" if ":" in model else ""
    return f"{model} is neither a folder or file here nor a model of the hub (ORG/NAME){hint}"


def _no_model(folder: Path) -> str:
    """Of a folder with none of the files that a model begins with."""
    inner = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if any((entry / "config.pbtxt").exists() or (entry / "1").is_dir() for entry in inner):
        return f"{folder} looks like a Triton model repository: penstock serve --model-repository {folder}"
    models = [entry for entry in inner if (entry / "config.json").exists()]
    hint = f"; did you mean {models[0]}?" if models else ""
    return f"{folder} has no model: neither config.json and tokenizer.json nor a GGUF file ({SUFFIX}){hint}"


def _only_file(folder: Path) -> Path:
    """The GGUF file of a folder, or the first of its parts. Raises ConfigError where there are several models."""
    files = sorted(folder.glob("*" + SUFFIX))
    if len(files) > 1 and files != all_parts(files[0]):
        names = ", ".join(file.name for file in files[:5])
        raise ConfigError(f"model: {folder} has several GGUF files: {names}; name the one to serve")
    return files[0]


def is_hub_id(model: str | None) -> bool:
    """Whether it names a model of the hub: nothing that is here, and nothing that looks like a path."""
    if model is None or model == DEMO_NAME or _path(model).exists():
        return False
    return not model.startswith(_LIKE_PATHS) and not model.endswith(SUFFIX) and _HUB_ID.fullmatch(model) is not None


def default_params(folder: Path) -> dict[str, Any]:
    """Sampling defaults from generation_config.json. do_sample false means greedy."""
    try:
        raw = read_json_if_any(folder / "generation_config.json")
    except EngineError as error:
        raise ConfigError(f"model: {error.message}") from None
    params = {name: raw[name] for name in _DEFAULTS if isinstance(raw.get(name), int | float)}
    if raw.get("do_sample") is False:
        params["temperature"] = 0.0
    return params


def load_chat_template(
    tokenizer: Tokenizer, override: str | None, content_format: ContentFormat | None = None
) -> ChatTemplate | None:
    """The operator's template for all chats, else the model's own ones. Raises ConfigError for one that does not
    compile."""
    tokens = tokenizer.special_tokens
    try:
        if override is not None:
            source = Path(override).read_text(encoding="utf-8-sig")
            return ChatTemplate(source, tokens, content_format) if source else None
        templates = tokenizer.chat_templates
        if not tokenizer.chat_template:
            _report_templates(templates)
            return None
        tool_use, rag = (templates.get(name) or None for name in ("tool_use", "rag"))
        if len(templates) == 1:
            tool_use = rag = None  # it is the one for all chats
        return ChatTemplate(tokenizer.chat_template, tokens, content_format, tool_use=tool_use, rag=rag)
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat-template: {error}") from None


def _report_templates(templates: Mapping[str, str]) -> None:
    if templates:
        logger.warning(
            "The model has the chat templates %s and none for other chats: name a file with --chat-template to serve "
            "chats.",
            ", ".join(sorted(templates)),
        )
