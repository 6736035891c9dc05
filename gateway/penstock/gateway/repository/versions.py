"""Which versions of a model are served."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
    found = sorted(set(available))
    match policy.WhichOneof("policy_choice"):
        case "specific":
            chosen = [version for version in found if version in policy.specific.versions]
            for version in sorted(set(policy.specific.versions) - set(found)):
                logger.error(
                    "version %d is specified for model '%s', but the version directory is not present", version, name
                )
        case "latest":
            chosen = found[-policy.latest.num_versions :] if policy.latest.num_versions else []
        case _:
            chosen = found
    if not chosen:
        raise InvalidRequestError(
            f"at least one version must be available under the version policy of model '{name}'; its folder has"
            f" {_there_is(found, name)}"
        )
    return chosen


def _there_is(versions: Sequence[int], name: str) -> str:
    if not versions:
        return f"none: model files lie in a folder whose name is the version's number, such as {name}/1"
    return ", ".join([*map(str, versions[:_SHOWN]), *(["..."] if len(versions) > _SHOWN else [])])
