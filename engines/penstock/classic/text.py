"""BYTES tensors for frameworks whose strings are text."""

from __future__ import annotations

import numpy as np

from penstock.classic.tensors import Array
from penstock.engines.errors import InvalidRequestError


def to_text(name: str, array: Array) -> Array:
    """Strings from bytes. Raises InvalidRequestError for bytes that are no UTF-8: the model's strings are text."""
    found = np.empty(array.size, np.object_)
    try:
        found[:] = [item.decode() for item in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"input '{name}' has a string that is not UTF-8 at byte {error.start}") from error
    return found.reshape(array.shape)


def to_bytes(array: Array) -> Array:
    found = np.empty(array.size, np.object_)
    found[:] = [item.encode() for item in array.ravel().tolist()]
    return found.reshape(array.shape)
