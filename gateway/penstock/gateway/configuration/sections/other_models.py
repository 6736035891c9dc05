"""Settings of the models beside MODEL: embeddings, repositories, other servers, and names for several of them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.gateway.configuration.sections.types import (
    Bytes,
    Folder,
    Name,
    Positive,
    Seconds,
    SomeFolder,
    SomeSeconds,
)
from penstock.gateway.configuration.traffic_rules import TrafficRule
from penstock.gateway.configuration.upstream_settings import UpstreamSettings


class EmbeddingsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models that give embeddings, scores and classes."""

    embedding_model: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "MODEL"},
            description="an embedding or ranking model beside MODEL, as FOLDER, hub id, or NAME=FOLDER; may be "
            "repeated",
        ),
    ] = ()
    embedding_batch_tokens: Annotated[
        Positive, Meta(description="most tokens of the texts that an encoder computes together")
    ] = 4096


class RepositoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models from Triton model repositories, under Triton's own flags."""

    model_repository: Annotated[
        tuple[SomeFolder, ...],
        Meta(description="folder or s3://, gs://, as:// location of a model repository; may be repeated"),
    ] = ()
    repository_links: Annotated[
        Literal["trusted", "inside", "modelcar"],
        Meta(
            description="symbolic links in local repositories that are followed. trusted: to what only root and the "
            "server's user can change; inside: only within the repository; modelcar: as trusted, and KServe's model "
            "cars"
        ),
    ] = "trusted"
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"],
        Meta(description="none: load all models at start; poll: follow changes; explicit: load and unload by request"),
    ] = "none"
    repository_poll_secs: Annotated[SomeSeconds, Meta(description="control mode poll: polling interval in seconds")] = (
        15.0
    )
    load_model: Annotated[
        tuple[Name, ...], Meta(description="control mode explicit: models to load at start, * for all; may be repeated")
    ] = ()
    load_on_demand: Annotated[
        bool,
        Meta(
            description="control mode explicit: load a model when a request asks for it, and unload the least recently "
            "used ones to make room; those of --load-model stay"
        ),
    ] = False
    load_on_demand_wait: Annotated[
        SomeSeconds, Meta(description="seconds that a request waits at most for its model")
    ] = 300.0
    load_on_demand_queue: Annotated[
        Positive, Meta(description="most requests that wait for models at the same time, for all models together")
    ] = 1024
    unload_after_idle: Annotated[
        Seconds,
        Meta(description="with --load-on-demand: unload a model that was not used for so many seconds; 0: never"),
    ] = 0.0
    exit_on_error: Annotated[bool, Meta(description="end the server when a model cannot be loaded at start")] = True
    strict_readiness: Annotated[bool, Meta(description="the server is ready only while all models are")] = True
    disable_auto_complete_config: Annotated[
        bool, Meta(description="do not complete configurations from the model files")
    ] = False
    model_config_name: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME"},
            description="use configs/NAME.pbtxt of a model where there is one, else config.pbtxt",
        ),
    ] = ""
    model_load_thread_count: Annotated[Positive, Meta(description="models that are loaded at the same time")] = 4
    model_load_retry_count: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="how often loading a model is tried again at start")
    ] = 0
    cache_config: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "KEY=VALUE"},
            description="the response cache: local,size=BYTES, or redis,host=NAME, redis,port=NUMBER; may be repeated",
        ),
    ] = ()
    response_cache_byte_size: Annotated[
        Bytes, Meta(description="bytes of a local response cache; 0: none, or that of --cache-config")
    ] = 0
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        Meta(
            description="execution_count: instances of classic models wait for the resources that their "
            "instance_group.rate_limiter names; off: it has no effect"
        ),
    ] = "off"
    rate_limit_resource: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "NAME:COUNT"},
            description="how much there is of a resource, as NAME:COUNT, or NAME:COUNT:DEVICE for one device; default: "
            "as much as one instance needs at most; may be repeated",
        ),
    ] = ()
    backend_directory: Annotated[Folder, Meta(description="folder with backends: NAME/backend.py or NAME/model.py")] = (
        ""
    )
    backend_config: Annotated[
        tuple[Name, ...],
        Meta(
            extra={"metavar": "KEY=VALUE"},
            description="a backend's setting, as BACKEND,KEY=VALUE, or KEY=VALUE for all; may be repeated",
        ),
    ] = ()


class TrafficConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name for several models."""

    traffic: Annotated[
        tuple[TrafficRule, ...],
        Meta(
            extra={"metavar": "JSON"},
            description="a public name with its targets, their weights, a shadow and a shift, as a JSON object; a file "
            "has them as tables; may be repeated",
        ),
    ] = ()


class UpstreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models on other servers, served through this one."""

    upstream: Annotated[
        tuple[UpstreamSettings, ...],
        Meta(
            extra={"metavar": "NAME=URL"},
            description="a model of a server with OpenAI's API, as NAME=URL or a JSON object with more settings; a "
            "file has them as tables; may be repeated",
        ),
    ] = ()
