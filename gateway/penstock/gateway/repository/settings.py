"""How the model repositories are served: Triton's options of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ControlMode = Literal["none", "poll", "explicit"]

ALL_MODELS = "*"
"""In `load_models`: every model of the repositories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    control_mode: ControlMode = "none"
    """none: everything is loaded at the start, and that is that. poll: changes are looked for every `poll_seconds`.
    explicit: `load_models` at the start, the rest when it is asked for."""
    poll_seconds: float = 15.0
    load_models: tuple[str, ...] = ()
    """Names, or `*`; explicit mode only."""
    strict_readiness: bool = True
    """The server is ready only while every model that should be loaded is."""
    missing: tuple[str, ...] = ()
    """Repositories that are not there: under strict readiness the server is never ready."""
    exit_on_error: bool = True
    """A model that cannot be loaded at the start stops the server."""
    auto_complete: bool = True
    """Backends fill in what the configuration leaves out and the model's file tells."""
    load_threads: int = 4
    """Model versions that are loaded at the same time."""
    load_retries: int = 0
    """Further attempts for a version that cannot be loaded."""
    config_name: str = ""
    """`configs/<config_name>.pbtxt` counts instead of config.pbtxt, where a model has it."""
    gpus: int = 0
    """GPUs that instance groups may be placed on."""
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings for backends, by backend; those under "" are for all of them."""
