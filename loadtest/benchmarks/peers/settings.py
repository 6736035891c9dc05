"""The settings of `python loadtest/benchmarks peers`, from which its flags are derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from benchmarks.peers.catalog import PEERS
from benchmarks.peers.shapes import SHAPES
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Positive

TABLES = ("generation", "tensors", "paced", "streaming", "turns", "images")
_USUAL_TABLES = TABLES[:4]
_USUAL_MODELS = ("tiny", "qwen05b-shape")
WEIGHTS = ("native", "int8", "int4")
TENSOR_MODELS = ("add_sub", "identity")
_Seconds = Annotated[float, Meta(gt=0)]


class PeersSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which servers are compared, and how long."""

    dir: Annotated[str, Meta(description="folder for environments, models and logs; about 8 GB with all peers")]
    setup: Annotated[
        bool,
        Meta(description="set up what --dir lacks; llamacpp, which is built for 20 minutes, only if --only names it"),
    ] = False
    run: Annotated[bool, Meta(description="--no-run: set up only")] = True
    only: Annotated[tuple[str, ...], Meta(description="peers by name; default: all that are set up")] = ()
    tables: Annotated[tuple[str, ...], Meta(description=f"of {', '.join(TABLES)}; default: the first four")] = (
        _USUAL_TABLES
    )
    models: Annotated[
        tuple[str, ...],
        Meta(description=f"for generation and turns, of {', '.join(SHAPES)}; default: the first two"),
    ] = _USUAL_MODELS
    weights: Annotated[
        tuple[str, ...],
        Meta(description="for generation, turns and images: native, int8, int4; those that a peer has a form of"),
    ] = ("native",)
    together: Annotated[
        bool, Meta(description="generation: all peers of --only in one table, beside Penstock's own choice")
    ] = False
    concurrency: Annotated[tuple[Positive, ...], Meta(description="generation: requests at a time")] = (1, 4, 16, 64)
    sampled: Annotated[
        tuple[Positive, ...], Meta(description="generation: requests at a time with temperature 0.7 and top_p 0.9")
    ] = (32,)
    tensor_models: Annotated[tuple[str, ...], Meta(description="for tensors: add_sub, identity")] = TENSOR_MODELS
    in_flight: Annotated[tuple[Positive, ...], Meta(description="tensors: requests at a time")] = (1, 32)
    streams: Annotated[tuple[Positive, ...], Meta(description="paced and streaming: streams at a time")] = (64, 256)
    prompt_tokens: Annotated[Positive, Meta(description="generation: tokens of a prompt")] = 128
    output_tokens: Annotated[Positive, Meta(description="generation, paced and streaming: tokens of an answer")] = 128
    waves: Annotated[
        Positive, Meta(description="generation: requests per place in a run; of the small model four times as many")
    ] = 1
    longest: Annotated[
        _Seconds,
        Meta(
            description="generation: a run begins no request after so many seconds; a server that takes longer is not "
            "measured again, nor with more requests at a time"
        ),
    ] = 120.0
    seconds: Annotated[_Seconds, Meta(description="tensors, paced and streaming: length of a run")] = 2.0
    repeat: Annotated[Positive, Meta(description="runs of each server, in turns; from 2 on ratios have intervals")] = 3
    timeout: Annotated[_Seconds, Meta(description="seconds that a server gets to start, and each request")] = 300.0
    json: Annotated[str | None, Meta(description="write everything as JSON here; - for standard output")] = None
    markdown: Annotated[str | None, Meta(description="write the tables here; default: standard output")] = None
    keep: Annotated[
        bool, Meta(description="what the file of --json holds of other tables, models and peers stays in the report")
    ] = False
    update: Annotated[
        tuple[str, ...],
        Meta(
            description="documents in which what stands between <!-- peers: tables -->, or <!-- peers: short -->, and "
            "<!-- /peers --> is replaced"
        ),
    ] = ()


LISTS = (
    "only",
    "tables",
    "models",
    "weights",
    "tensor_models",
    "concurrency",
    "sampled",
    "in_flight",
    "streams",
    "update",
)
"""Settings that take several values, with commas between."""


def settings(flags: Mapping[str, Any]) -> PeersSettings:
    """From settings by name, as text or as what they are. Raises LoadTestError, naming the setting."""
    if "dir" not in flags:
        raise LoadTestError("--dir FOLDER is required: where the peers are, or where to put them")
    try:
        chosen = msgspec.convert(dict(flags), PeersSettings, strict=False)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        raise LoadTestError(f"{where.rstrip('`').replace('_', '-')}: {problem}") from None
    if chosen.keep and chosen.json in (None, "-"):
        raise LoadTestError("--keep requires --json FILE")
    for name, values, known in (
        ("only", chosen.only, PEERS),
        ("tables", chosen.tables, TABLES),
        ("models", chosen.models, SHAPES),
        ("weights", chosen.weights, WEIGHTS),
        ("tensor-models", chosen.tensor_models, TENSOR_MODELS),
    ):
        if unknown := [value for value in values if value not in known]:
            raise LoadTestError(f"{name}: {', '.join(unknown)} is none of {', '.join(known)}")
    return chosen
