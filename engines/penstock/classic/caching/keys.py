"""Keys of the response cache: what an answer depends on, as a hash that nobody can make collide (SHA-256)."""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path
from uuid import uuid4

from penstock.classic.base import ModelContext
from penstock.classic.messages import InferRequest
from penstock.classic.model_files import TooManyFilesError, files_below
from penstock.classic.tensors import to_buffer


def response_key(identity: bytes, request: InferRequest) -> bytes:
    """`identity` names the model version. The rest is the caller's tenant, inputs, requested outputs and parameters,
    each behind its length, so that no two requests give the same bytes. The request's id, priority and times are not
    part of it."""
    digest = sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(identity)
    add(request.tenant.encode())
    add(repr(request.outputs).encode())
    add(repr(sorted(request.parameters.items())).encode())
    for name, tensor in sorted(request.inputs.items()):
        add(name.encode())
        add(f"{tensor.datatype} {tensor.array.shape}".encode())
        add(to_buffer(tensor))
    return digest.digest()


def loaded_identity() -> bytes:
    """Of a model version as it is loaded now. Loaded again, it has another one, so nothing stale is ever found."""
    return uuid4().bytes


def content_identity(context: ModelContext) -> bytes:
    """The same for the same name, version, configuration and files, on any server; that of this load alone where the
    model's links lead to too many files. In a thread: it reads files."""
    digest = sha256(f"{context.name}/{context.version}\n".encode())
    digest.update(context.config.SerializeToString(deterministic=True))
    places = (place for place in context.model_folder.iterdir() if not _is_another_version(place, context.version))
    try:
        for path in files_below(places):
            digest.update(f"\n{path.relative_to(context.model_folder)}\n".encode())
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    except TooManyFilesError:
        return loaded_identity()
    return digest.digest()


def _is_another_version(place: Path, version: int) -> bool:
    return place.name.isdigit() and place.name != str(version)
