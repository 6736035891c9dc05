"""A GGUF file as a model's folder: the JSON files of one, made from the metadata, beside links to the weights."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from penstock.engines.errors import PenstockError
from penstock.engines.formats.gguf.files import all_parts, config_of, read_parts, sampling_of
from penstock.engines.formats.model_files import real_path
from penstock.engines.host.user_cache import user_cache
from penstock.gateway.configuration.config import ConfigError
from penstock.tokenizers import TokenizerError
from penstock.tokenizers.gguf_tokenizer import end_token_ids_of, tokenizer_config_of, tokenizer_of

_LAYOUT = "4"
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
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        tokenizer_of(metadata).save(str(made / "tokenizer.json"))
        _write(made / "tokenizer_config.json", tokenizer_config_of(metadata))
        _write(made / "config.json", config_of(metadata, tensors))
        _write(made / "generation_config.json", {"eos_token_id": end_token_ids_of(metadata), **sampling_of(metadata)})
        for part in parts:  # by their names here: what these lead to may be called by a checksum
            (made / part.name).symlink_to(real_path(part))
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))
