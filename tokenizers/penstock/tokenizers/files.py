"""A tokenizer's settings in the JSON and Jinja files beside `tokenizer.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import TokenizerError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedTokenSpec:
    """One entry of `added_tokens_decoder`."""

    content: str
    special: bool
    flags: dict[str, bool]
    """lstrip, rstrip, single_word, normalized."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The folder's settings, with defaults for whatever it leaves out."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    """By role: `{"bos_token": "<s>", ...}`; roles without a token are absent."""
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: dict[int, AddedTokenSpec] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; the one to use without further ado is called `default`."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads tokenizer_config.json, special_tokens_map.json and the chat template files; each is optional.

    Raises TokenizerError for a file that is not what it should be.
    """
    config = read_json(folder / "tokenizer_config.json")
    merged = {**read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    extra = merged.get("extra_special_tokens", merged.get("additional_special_tokens")) or []
    if isinstance(extra, dict):
        extra = list(extra.values())
    return TokenizerFiles(
        special_tokens={name: content for name in SPECIAL_TOKEN_NAMES if (content := _token_content(merged.get(name)))},
        extra_special_tokens=tuple(content for token in extra if (content := _token_content(token))),
        added_tokens=_added_tokens(folder, config),
        chat_templates=_chat_templates(folder, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one where there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} must hold a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a byte-order mark
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path.name} cannot be read: {error}") from None


def _token_content(token: object) -> str | None:
    """A token is written as its text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedTokenSpec]:
    """Older folders list added tokens in added_tokens.json, newer ones in `added_tokens_decoder`."""
    specs = {
        token_id: AddedTokenSpec(content, special=False, flags={})
        for content, token_id in read_json(folder / "added_tokens.json").items()
        if isinstance(token_id, int)
    }
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        content = _token_content(entry)
        if content is None or not str(key).isdecimal():
            raise TokenizerError(f"tokenizer_config.json: added_tokens_decoder[{key!r}] has no content")
        flags = (
            {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k in _FLAGS and isinstance(v, bool)}
        )
        specs[int(key)] = AddedTokenSpec(content, isinstance(entry, dict) and bool(entry.get("special")), flags)
    return specs


_FLAGS = frozenset(("lstrip", "rstrip", "single_word", "normalized"))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own win over tokenizer_config.json, as in transformers."""
    templates = _named_templates(config.get("chat_template"), "tokenizer_config.json")
    templates |= _named_templates(read_json(folder / "chat_template.json").get("chat_template"), "chat_template.json")
    default = _read_text(folder / "chat_template.jinja")
    if default is not None:
        templates["default"] = default
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path) or ""
    return templates


def _named_templates(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    templates = {}
    for entry in value if isinstance(value, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(f"{where}: chat_template must be a string or a list of named templates")
        templates[name] = template
    return templates
