"""Types that the settings of several sections have.

`extra` is for `configuration.plain_values` and `configuration.flags`: `unit` is what a number of the setting counts, so
that texts may have units, and `metavar` what the help calls its value.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535, extra={"metavar": "PORT"})]
Positive = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=0, extra={"unit": "bytes"})]
SomeBytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"})]
Memory = Annotated[str | Positive, Meta(extra={"unit": "memory"})]
"""Bytes, or a share of what is free, which stays a text."""
Seconds = Annotated[float, Meta(ge=0, extra={"unit": "s"})]
SomeSeconds = Annotated[float, Meta(gt=0, extra={"unit": "s"})]
Milliseconds = Annotated[float, Meta(ge=0, extra={"unit": "ms"})]
WholeMilliseconds = Annotated[int, Meta(ge=0, extra={"unit": "ms"})]
SomeMilliseconds = Annotated[int, Meta(ge=1, extra={"unit": "ms"})]
Microseconds = Annotated[float, Meta(ge=0, extra={"unit": "us"})]
ListeningPort = Literal["http", "grpc", "metrics"]
Name = Annotated[str, Meta(min_length=1, extra={"metavar": "NAME"})]
"""Never empty: `--api-key "$KEY"` without a KEY must not let in clients that send an empty one, or no key at all."""
Key = Annotated[Name, Meta(extra={"metavar": "KEY"})]
File = Annotated[str, Meta(extra={"metavar": "FILE"})]
Folder = Annotated[str, Meta(extra={"metavar": "DIR"})]
Address = Annotated[str, Meta(extra={"metavar": "ADDR"})]
SomeFile = Annotated[File, Meta(min_length=1)]
SomeFolder = Annotated[Folder, Meta(min_length=1)]
SomeAddress = Annotated[Address, Meta(min_length=1)]

Beside = Literal["penstock", "foreign", "embedding"]
"""Kinds of models beside MODEL: those of repositories with our settings, those with vLLM's or TensorRT-LLM's, and those
of --embedding-model."""


def shared(*kinds: Beside) -> Meta:
    """For a setting of MODEL, or a section of them: the kinds of models that take its value, too, where they have none
    of their own. Without a mark all do; that of a setting counts more than that of its section."""
    return Meta(extra={"shared": kinds})


OWN = shared()
