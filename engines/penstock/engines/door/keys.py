"""The key that an engine's door and its clients share, and the two key pairs of CURVE that it stands for.

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) encrypts a connection and proves to each side that the other has its
secret key. Both key pairs are derived from the one shared key, so a single file is all that an operator copies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple

_PREFIX = "pek-"
_BYTES = 32


class KeyPair(NamedTuple):
    """In Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes


def new_key() -> str:
    return _PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_BYTES)).decode().rstrip("=")


def read_key(path: Path) -> str:
    """Raises OSError, and ValueError for a file that other users can read, or that holds no key."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{path} must belong to this user, and nobody else may read it (chmod 600)")
    key = path.read_text().strip()
    _secret_of(key)
    return key


def engine_pair(key: str) -> KeyPair:
    """The door's."""
    return _pair(key, b"engine")


def client_pair(key: str) -> KeyPair:
    """That of all clients."""
    return _pair(key, b"client")


def _pair(key: str, side: bytes) -> KeyPair:
    import zmq
    from zmq.utils import z85

    secret = z85.encode(hashlib.blake2b(side, key=_secret_of(key), digest_size=32, person=b"penstock door").digest())
    return KeyPair(zmq.curve_public(secret), secret)


def _secret_of(key: str) -> bytes:
    """Raises ValueError."""
    text = key.removeprefix(_PREFIX)
    try:
        secret = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not key.startswith(_PREFIX) or len(secret) != _BYTES:
        raise ValueError("that is no key for an engine's door; penstock key new --engine makes one")
    return secret
