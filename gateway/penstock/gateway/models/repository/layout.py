"""Folders of a model repository: names, versions, backends.

<repository>/<model>/config.pbtxt
<repository>/<model>/<version>/model.onnx
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelVersionPolicy

from penstock.engines.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_SHOWN = 8
"""Versions in an error; a folder may have thousands."""


def select_versions(policy: ModelVersionPolicy, available: Sequence[int], name: str = "") -> list[int]:
    """The versions to serve, ascending: the latest n, all (also when the policy says nothing), or the listed ones.

    A listed version that is not there is logged and left out, as in Triton.

    Raises InvalidRequestError, with Triton's text and what there is, when nothing is left.
    """
    versions = sorted(set(available))
    match policy.WhichOneof("policy_choice"):
        case "specific":
            chosen = [version for version in versions if version in policy.specific.versions]
            for version in sorted(set(policy.specific.versions) - set(versions)):
                logger.error(
                    "version %d is specified for model '%s', but the version directory is not present", version, name
                )
        case "latest":
            chosen = versions[-policy.latest.num_versions :] if policy.latest.num_versions else []
        case _:
            chosen = versions
    if not chosen:
        raise InvalidRequestError(
            f"at least one version must be available under the version policy of model '{name}'; its folder has"
            f" {_there_is(versions, name)}"
        )
    return chosen


def _there_is(versions: Sequence[int], name: str) -> str:
    if not versions:
        return f"none: model files lie in a folder whose name is the version's number, such as {name}/1"
    return ", ".join([*map(str, versions[:_SHOWN]), *(["..."] if len(versions) > _SHOWN else [])])


EMPTY_NAME = "Model name cannot be empty. Please enter a valid name to deploy."
"""Triton's text, also for names of nothing but white space."""

_NO_NAME = "failed to load the model, invalid model name"
_NAME = re.compile(r"[A-Za-z0-9._,-]{1,255}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


class ModelFileError(InvalidRequestError):
    """A file of a model cannot be taken. `public` is the message for callers who may not administer: without contents
    of files and without paths of this machine."""

    def __init__(self, message: str, public: str) -> None:
        super().__init__(message)
        self.public = public


def check_model_name(name: str) -> str:
    """The name itself, when it can be a folder of the repository: letters, digits, `.`, `,`, `_` and `-`, at most 255.

    Everything that could lead out of the repository or forge a line of a log is refused: separators, control
    characters, `%`, `.` and `..`, look-alikes from Unicode. Names such as `...` lead nowhere and pass.

    Raises InvalidRequestError; the name is not echoed.
    """
    if not name.strip():
        raise InvalidRequestError(EMPTY_NAME)
    if "/" in name or name.strip() == "..":
        raise InvalidRequestError(f"{_NO_NAME}: model name must not contain path traversal characters")
    if name == "." or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{_NO_NAME}: a name has letters, digits, '.', ',', '_' and '-' only, and at most 255 of them."
        )
    return name


def is_model_name(name: str) -> bool:
    """Whether a folder of this name is a model: hidden ones (`.git`) never are."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def check_version(text: str) -> int:
    """The version of a request or a folder: a positive integer of at most 18 digits (time stamps are in use), without
    leading zeros.

    Raises InvalidRequestError with Triton's text.
    """
    if not _VERSION.fullmatch(text):
        shown = text if re.fullmatch(r"[\w.+-]{1,32}", text, re.ASCII) else "..."
        raise InvalidRequestError(
            f"failed to get model version from specified version string '{shown}',"
            " version should be an integral value > 0"
        )
    return int(text)


def available_versions(folder: Path) -> list[int]:
    """The version folders of a model, ascending. Other folders (`configs`, `007`, `0`) are not versions.

    Raises OSError when the folder cannot be read.
    """
    return sorted(int(entry.name) for entry in folder.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir())


def backend_of_name(name: str) -> str:
    """`identity` for a model that is called `anything.identity`; "" for a name without a dot."""
    return name.partition(".")[2]
