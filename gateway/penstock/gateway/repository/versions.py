"""Which versions of a model are served."""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelVersionPolicy

from penstock.engines.errors import InvalidRequestError


def select_versions(policy: ModelVersionPolicy, available: Sequence[int]) -> list[int]:
    """The versions to serve, ascending: the latest n (1 without a policy), all, or the listed ones.

    Raises InvalidRequestError, with Triton's text, when nothing is left, and for a listed version that is not there.
    """
    found = sorted(set(available))
    match policy.WhichOneof("policy_choice"):
        case "all":
            chosen = found
        case "specific":
            chosen = sorted(set(policy.specific.versions))
            missing = [version for version in chosen if version not in found]
            if missing:
                raise InvalidRequestError(
                    f"version {missing[0]} is specified in the version policy but is not in the model repository"
                )
        case "latest":
            chosen = found[-max(1, policy.latest.num_versions) :]
        case _:
            chosen = found[-1:]
    if not chosen:
        raise InvalidRequestError("at least one version must be available under the version policy of model")
    return chosen
