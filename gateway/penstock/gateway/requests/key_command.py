"""`penstock key new`: makes a key, and the entry of the key file that belongs to it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.door.keys import new_key
from penstock.gateway.requests.access import key_digest
from penstock.gateway.requests.context import USER_ROLES, Role
from penstock.gateway.requests.key_file import KeyEntry

_RANDOM_BYTES = 32
_LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "concurrent_requests"),
    *("tokens_per_day", "tokens_per_month"),
)


def add_key_command(commands: Any) -> None:
    """`commands` are argparse's subparsers."""
    key = commands.add_parser("key", help="make API keys", description="Makes API keys for --api-key-file.")
    verbs = key.add_subparsers(required=True, metavar="COMMAND")
    new = verbs.add_parser(
        "new",
        help="make a key",
        description="Shows a new key, once, and its entry for the key file, which holds only the key's digest. "
        "A running server reads its key file again when it gets SIGHUP. With --engine: a key for --engine-key, which "
        "two servers share when one uses the other's engine.",
    )
    kind = new.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tenant", metavar="NAME", help="the key's owner, as metrics and logs show it")
    kind.add_argument("--engine", action="store_true", help="a key for engines, not for the callers of an API")
    new.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="the key file to add the entry to; the key is then what is printed. With --engine: the file to make",
    )
    new.add_argument(
        "--role",
        action="append",
        choices=[str(role) for role in Role],
        help=f"what the key allows; may be repeated (default: {', '.join(sorted(USER_ROLES))})",
    )
    new.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="a model that it may use, * for any text; may be repeated",
    )
    new.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="priority of its requests (--policy=priority); lower runs first",
    )
    for limit in _LIMITS:
        new.add_argument("--" + limit.replace("_", "-"), type=int, metavar="N")
    new.set_defaults(run_command=lambda args: _new(new, args))


def _new(parser: argparse.ArgumentParser, args: dict[str, Any]) -> int:
    if args["engine"]:
        return _new_engine_key(parser, args)
    key = "psk-" + secrets.token_urlsafe(_RANDOM_BYTES)
    fields = {
        "sha256": key_digest(key.encode()).hex(),
        "tenant": args["tenant"],
        "roles": args["role"] or sorted(USER_ROLES),
        "models": args["model"],
        "priority": args["priority"],
        **{name: args[name] for name in _LIMITS},
    }
    try:
        entry = msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    text = _toml(entry)
    if args["file"] is None:
        print(text, end="")
        print(f"The key, which is shown only here: {key}", file=sys.stderr)
        return 0
    try:
        _append(args["file"], text)
    except OSError as error:
        parser.error(f"--file: {error}")
    print(key)
    print(f"Added to {args['file']}. The key is shown only here.", file=sys.stderr)
    return 0


def _new_engine_key(parser: argparse.ArgumentParser, args: dict[str, Any]) -> int:
    options = [name for name in ("role", "model", "priority", *_LIMITS) if args[name]]
    if options:
        parser.error(f"--{options[0].replace('_', '-')}: not with --engine, whose keys have neither roles nor limits")
    key = new_key()
    if args["file"] is None:
        print(key)
        return 0
    try:
        handle = os.open(args["file"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        parser.error(f"--file: {error}")
    with os.fdopen(handle, "w") as file:
        file.write(key + "\n")
    print(
        f"A new key is in {args['file']}. Both sides need it: copy it where nobody else can read it.", file=sys.stderr
    )
    return 0


def _append(path: Path, text: str) -> None:
    """A new file can be read by its owner only."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "a") as file:
        file.write("\n" + text if file.tell() else text)


def _toml(entry: KeyEntry) -> str:
    """TOML's strings, numbers and arrays of them are written as JSON's."""
    values = msgspec.to_builtins(entry, order="deterministic")
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]
    return "\n".join(["[[key]]", *lines]) + "\n"
