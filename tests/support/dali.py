"""Pictures and pipelines for tests of the dali backend."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from nvidia.dali import fn, pipeline_def, types


def png(width: int, height: int, colour: Sequence[int] = (10, 20, 30)) -> bytes:
    """A PNG file in one colour."""
    row = b"\0" + bytes(colour) * width
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pipeline_def(batch_size=8, num_threads=1, device_id=None)
def scaled_picture(number: float) -> Any:
    """INPUT0 FP32[n] times `number`; IMAGE, a file, as [2, 2, 3]."""
    given = fn.external_source(name="INPUT0", dtype=types.FLOAT, ndim=1)
    picture = fn.decoders.image(fn.external_source(name="IMAGE", dtype=types.UINT8, ndim=1), device="cpu")
    return given * number, fn.resize(picture, resize_x=2, resize_y=2)


@pipeline_def(batch_size=4, num_threads=1, device_id=None, output_dtype=[types.UINT8], output_ndim=[3])
def decoder() -> Any:
    """IMAGE, a file, as [height, width, 3]."""
    return fn.decoders.image(fn.external_source(name="IMAGE", dtype=types.UINT8, ndim=1), device="cpu")
