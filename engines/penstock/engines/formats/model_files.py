"""Files of a model: its weights, the JSON beside them, and graphs that OpenVINO's tools exported."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import EngineError, UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_NO_MODELS = ("adapter", "optimizer")
"""Beginnings of the names of files in the format that hold no model."""
_COPY = "consolidated"
_MOST_NAMES = 5
"""In a message."""


def real_path(path: Path) -> Path:
    """Without links. What lies in the mounts of another process, as KServe's model cars do, has no such path here, and
    keeps its own."""
    real = path.resolve()
    return real if real.exists() and real.samefile(path) else path.absolute()


def read_json_value(path: Path) -> Any:
    """Of a file of a checkpoint; editors on Windows begin such files with a byte-order mark. Raises EngineError."""
    try:
        return json.loads(path.read_bytes())  # of bytes it takes the mark, of text it would not
    except OSError as e:
        raise EngineError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise EngineError(f"{path} is not JSON: {e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError when there is no JSON object to be read."""
    settings = read_json_value(path)
    if not isinstance(settings, dict):
        raise EngineError(f"{path} does not hold an object")
    return settings


def read_json_if_any(path: Path) -> dict[str, Any]:
    """As `read_json`, and {} where there is no such file."""
    return read_json(path) if path.is_file() else {}


# Tokens that end an answer


class _AddedToken(msgspec.Struct):
    content: str
    id: int


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"null")


class _TokenizerFile(msgspec.Struct):
    """What counts here of tokenizer.json; a large vocabulary stays as it is until it is needed."""

    added_tokens: list[_AddedToken] = []
    model: _Model = msgspec.field(default_factory=_Model)


def eos_token_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """All tokens that a model's files name as the end of a text, below `vocab_size`: in generation_config.json, in
    config.json, there also in its text_config, and as the tokenizer's eos_token.

    Not the first of these alone: fine-tuned chat models often keep those of their base model in some, which never
    end a turn. Raises EngineError.
    """
    settings = read_json_if_any(model_dir / "config.json")
    inner = settings.get("text_config")
    named = (read_json_if_any(model_dir / "generation_config.json"), settings, inner)
    ids = [known.get("eos_token_id") for known in named if isinstance(known, dict)]
    return ids_of_vocabulary(vocab_size, *ids, _eos_of_tokenizer(model_dir))


def ids_of_vocabulary(vocab_size: int, *values: Any) -> tuple[int, ...]:
    """Of values that are one id, several, or None: those that a model can sample, since its logits end at
    `vocab_size`. Raises EngineError for anything else."""
    ids = [i for value in values for i in (value if isinstance(value, list) else [value]) if i is not None]
    strange = next((i for i in ids if type(i) is not int), None)
    if strange is not None:
        raise EngineError(f"eos_token_id has {str(strange)[:50]!r}, which is not a token id")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _eos_of_tokenizer(model_dir: Path) -> int | None:
    """None: it names none, or one that is not in its vocabulary."""
    settings = read_json_if_any(model_dir / "tokenizer_config.json")
    token = settings.get("eos_token") or read_json_if_any(model_dir / "special_tokens_map.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return _token_id(model_dir, settings, text) if isinstance(text, str) else None


def _token_id(model_dir: Path, settings: Mapping[str, Any], text: str) -> int | None:
    """`settings`: tokenizer_config.json. Broken files are refused where texts are tokenized, not here."""
    with suppress(OSError, msgspec.MsgspecError, ValueError):
        content = (model_dir / "tokenizer.json").read_bytes().removeprefix(BOM_UTF8)
        tokenizer = msgspec.json.decode(content, type=_TokenizerFile)
        added = {token.content: token.id for token in tokenizer.added_tokens}
        if text in added:
            return added[text]
        vocab = msgspec.json.decode(tokenizer.model.vocab)
        if isinstance(vocab, dict) and type(vocab.get(text)) is int:
            return int(vocab[text])
        if isinstance(vocab, list):  # of Unigram: each with its score
            return next((i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry[:1] == [text]), None)
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    matching = (key for key, entry in entries if isinstance(entry, dict) and entry.get("content") == text)
    return next((int(key) for key in matching if key.isdecimal()), None)


# Weights


def has_weights(model_dir: Path) -> bool:
    """Whether there are safetensors that `weight_files` would choose from."""
    return bool(_weights_in(model_dir)) or (model_dir / INDEX).is_file()


def weight_files(model_dir: Path) -> list[Path]:
    """model.safetensors; or the shards that an index names, or that their own names say are all; or the only file of
    the format. Whether the files of an index are there is not looked at.

    Only safetensors of the folder itself: other formats of the field are pickles, which run code when they are loaded.
    Raises UnsupportedError where there are none, or several models; EngineError for an index that is damaged or names
    anything else, and for shards that are not all there.
    """
    if (model_dir / SINGLE).is_file():
        return [model_dir / SINGLE]
    if (model_dir / INDEX).is_file():
        return [model_dir / name for name in _named_by_index(model_dir / INDEX)]
    files = _weights_in(model_dir)
    if not files:
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in model_dir.glob(pattern)]
        hint = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise UnsupportedError(f"no model.safetensors in {model_dir}: weights are read from safetensors only{hint}")
    shards = [match for path in files if (match := _SHARD.fullmatch(path.name))]
    if len({(match[1], match[3]) for match in shards}) == 1:
        return _all_shards(model_dir, shards[0])
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:_MOST_NAMES]) + (" ..." if len(files) > _MOST_NAMES else "")
        raise UnsupportedError(f"{model_dir} has several files of weights, {names}, and none is called {SINGLE}")
    return files


def _weights_in(model_dir: Path) -> list[Path]:
    """Of the folder itself; Mistral's own layout, which many folders have a second time, only where it is alone."""
    files = [path for path in sorted(model_dir.glob("*.safetensors")) if not path.name.startswith(_NO_MODELS)]
    return [path for path in files if not path.name.startswith(_COPY)] or files


def _named_by_index(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    except (KeyError, TypeError, AttributeError) as e:
        raise EngineError(f"{index.name} is damaged: {e!r}") from e
    if strange:
        raise EngineError(f"{index.name} names a file that is no safetensors file of its folder: {strange[0]}")
    return names


def _all_shards(model_dir: Path, one: re.Match[str]) -> list[Path]:
    count, digits = int(one[3]), len(one[2])
    paths = [model_dir / f"{one[1]}-{number:0{digits}d}-of-{one[3]}.safetensors" for number in range(1, count + 1)]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise EngineError(f"{one[0]} is one of {count} files of weights; there is no {missing.name}")
    return paths


_GRAPH = "openvino_model.xml"


def exported_graph(folder: Path) -> Path | None:
    """None where there is none, and where the folder has the same weights in safetensors."""
    path = folder / _GRAPH
    return path if path.is_file() and not has_weights(folder) else None


def graph_key(graph: Path) -> str:
    """Of what the files are now: others at the same place have another size or time."""
    stats = [(path, path.stat()) for path in (real_path(graph), weights_of(real_path(graph)))]
    return repr([(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def weights_of(graph: Path) -> Path:
    return graph.with_suffix(".bin")
